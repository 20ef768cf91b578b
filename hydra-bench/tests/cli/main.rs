//! The program as a user runs it: every test starts the built `hydra` in a process of its own, and reads what it prints
//! and writes.

mod adapters;
mod browser;
mod cases;
mod check;
mod common;
mod convolutions;
mod disk;
mod doctor;
mod endings;
mod evaluations;
mod examples;
mod explain;
mod flags;
mod http;
mod hub;
mod in_turn;
mod install;
mod lab;
mod ledger;
mod page;
mod parquet;
mod parts;
mod pictures;
mod progress;
mod resume;
mod runs;
mod saving;
mod search;
mod several;
mod so_far;
mod steering;
mod step;
mod trackers;
mod vocabulary;
mod ways_out;
