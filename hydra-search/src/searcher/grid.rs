//! Every configuration of lists of values.

use super::full::Full;
use crate::space::{Configuration, Space, SpaceError};

/// The grid of a space after the trials that were given, all of them trained to their end.
pub(super) fn grid(space: &Space, given: Vec<Configuration>, steps: usize) -> Result<Full, SpaceError> {
    let grid = if space.is_empty() { Vec::new() } else { space.grid()? };
    Ok(Full::new(given.into_iter().chain(grid), steps))
}
