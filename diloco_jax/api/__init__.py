"""What users import: join, run, run_syncer, load_params, and the single controller."""
