//! The simulator: schedules, the policies on drawn workloads, policies that break the rules, and workloads as text.

mod broken_policies;
mod heavy_tails;
mod many_models;
mod schedules;
mod workload;
