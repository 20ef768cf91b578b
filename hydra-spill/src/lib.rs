//! Where bytes are and how they move: budgets, stores, links, double buffering.
