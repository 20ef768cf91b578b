//! Scheduling: whose turn it is, what a task may do to the others, and the record of it. No counting allocator is
//! installed: what shards need is estimated from shapes.

#[path = "../common/mod.rs"]
mod common;
mod estimates;
mod isolation;
mod once;
mod patient;
mod places;
mod queued;
mod record;
