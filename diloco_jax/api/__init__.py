"""What users import: join, run, open_run, run_syncer, load_params, and the single controller."""
