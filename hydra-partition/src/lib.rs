//! Where a model is cut: the pilot pass and the partition plan.
