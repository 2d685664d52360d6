"""The syncer's half of the protocol: `machine.SyncerMachine` and its parts."""
