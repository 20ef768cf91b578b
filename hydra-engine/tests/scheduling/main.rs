//! Scheduling: the order of tasks, their isolation from each other, and the recorded workload. No counting allocator
//! is installed: the memory of shards is estimated from shapes.

#[path = "../common/mod.rs"]
mod common;
mod estimates;
mod isolation;
mod once;
mod patient;
mod places;
mod queued;
mod record;
