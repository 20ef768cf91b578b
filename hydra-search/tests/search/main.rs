//! Searches from outside: a machine that carries out actions in drawn orders, and what comes of it.

mod budgets;
mod machine;
mod methods;
mod orders;
mod sharing;
