//! Running it: the orchestrator, the shard executor, the host optimizer, the run log.
