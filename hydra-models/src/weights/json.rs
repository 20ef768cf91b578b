//! Files of JSON beside weights.

use crate::ModelError;
use serde::de::DeserializeOwned;
use std::fs;
use std::path::Path;

/// Reads a file of JSON.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, ModelError> {
    let text = fs::read(path).map_err(|source| ModelError::Read { path: path.to_owned(), source })?;
    serde_json::from_slice(&text).map_err(|source| ModelError::Json { path: path.to_owned(), source })
}
