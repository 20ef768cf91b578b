//! Tests of searches through the public API: a driver carries out actions in random orders, and the results are
//! checked.

mod budgets;
mod machine;
mod methods;
mod orders;
mod sharing;
