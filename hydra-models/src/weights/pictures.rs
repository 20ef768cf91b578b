//! Writing a model that reads pictures.

use super::{Export, failed};
use crate::data::{PREPROCESSOR, Preprocessor};
use hydra_core::{Chain, ImageReader, WeightError, replace_file};
use std::io::Write;
use std::path::Path;

impl Export<'_> {
    /// The same as [`write`](Self::write) for a model of pictures of this side: the preprocessor's configuration is its
    /// directory's, or says what is done where nobody says otherwise.
    ///
    /// # Errors
    /// What cannot be read or written.
    pub fn write_for_pictures(
        self,
        side: usize,
        chain: &Chain,
        images: &dyn ImageReader,
        dir: &Path,
    ) -> Result<(), WeightError> {
        let carried = self.source.is_some();
        self.write(chain, images, dir)?;
        if carried {
            return Ok(());
        }
        let (path, text) = (dir.join(PREPROCESSOR), Preprocessor::of_side(side).to_json());
        replace_file(&path, |out| out.write_all(text.as_bytes())).map_err(|e| failed(&path, e))
    }
}
