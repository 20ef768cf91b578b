//! Grid search: all configurations of lists of values.

use super::full::Full;
use crate::space::{Configuration, Space, SpaceError};

/// The given trials, then the grid of a space, all trained to the end.
pub(super) fn grid(space: &Space, given: Vec<Configuration>, steps: usize) -> Result<Full, SpaceError> {
    let grid = if space.is_empty() { Vec::new() } else { space.grid()? };
    Ok(Full::new(given.into_iter().chain(grid), steps))
}
