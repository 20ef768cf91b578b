//! Hashes of the inputs of a run, which must be unchanged when a resumed run trains a task from the start.
//!
//! A checkpoint identifies its own data and architecture. A task without a checkpoint relies on these hashes, which also
//! cover the initial weights.

use crate::run_dir::paths::could_not;
use crate::settings::ModelSettings;
use anyhow::{Context, Result, bail};
use hydra_models::data::Content;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io;
use std::path::PathBuf;

/// SHA-256 hashes of the model and the data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Inputs {
    /// Covers the configuration and the bytes of the weight files.
    model_sha256: String,
    /// Covers the content of all splits.
    data_sha256: String,
}

impl Inputs {
    /// Hashes the weight files of a model and its configuration, `described`.
    pub(crate) fn of(
        described: &str,
        weights: &[PathBuf],
        splits: [Option<&dyn Content>; 3],
    ) -> Result<Self> {
        let mut hash = Sha256::new_with_prefix(described);
        for file in weights {
            let read = File::open(file).and_then(|mut file| io::copy(&mut file, &mut hash));
            read.with_context(|| could_not(file, "read"))?;
        }
        Ok(Self { model_sha256: format!("{:x}", hash.finalize()), data_sha256: hash_of_content(splits)? })
    }

    /// Combines the inputs of several models. A single model's inputs are returned unchanged.
    pub(crate) fn of_all(mut each: Vec<Self>) -> Option<Self> {
        if each.len() < 2 {
            return each.pop();
        }
        let hash = |of: fn(&Self) -> &str| {
            let all: String = each.iter().map(of).collect();
            format!("{:x}", Sha256::digest(all))
        };
        Some(Self { model_sha256: hash(|one| &one.model_sha256), data_sha256: hash(|one| &one.data_sha256) })
    }

    /// Fails if `now` differs from these inputs, for a task that starts from the beginning.
    pub(crate) fn check(&self, task: &str, now: &Self, models: &[&ModelSettings]) -> Result<()> {
        let names = |name: fn(&ModelSettings) -> &str| {
            models.iter().map(|model| name(model)).collect::<Vec<_>>().join(",")
        };
        for (what, name, before, now) in [
            ("model", names(ModelSettings::name), &self.model_sha256, &now.model_sha256),
            ("data", names(ModelSettings::text), &self.data_sha256, &now.data_sha256),
        ] {
            if before != now {
                bail!(
                    "task `{task}` has no checkpoint and starts from the beginning, and the {what} `{name}` has changed since \
                    the run was started: its SHA-256 was {before} and is {now} now; restore it, or start another run"
                );
            }
        }
        Ok(())
    }
}

/// Hashes the content of the splits; a split may be missing.
fn hash_of_content(splits: [Option<&dyn Content>; 3]) -> Result<String> {
    let mut hash = Sha256::new();
    for split in splits {
        match split {
            Some(data) => data.content(&mut |bytes| hash.update(bytes))?,
            None => hash.update((-1_i64).to_le_bytes()),
        }
    }
    Ok(format!("{:x}", hash.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_models::data::{BlockSpec, TokenBlocks};

    #[test]
    fn tokens_are_told_apart_by_value_order_and_split() {
        let data = |ids: &[u32]| TokenBlocks::new(ids, BlockSpec { context: 2, vocab_size: 3 }).unwrap();
        let (a, b, c) = (data(&[1, 2]), data(&[2, 1]), data(&[1, 2, 2, 1]));
        let hashes = [
            [Some(&a), None, None],
            [Some(&b), None, None],
            [None, Some(&a), None],
            [Some(&a), Some(&b), None],
            [Some(&c), None, None],
        ];
        let hash = |splits: [Option<&TokenBlocks>; 3]| {
            hash_of_content(splits.map(|split| split.map(|data| data as &dyn Content))).unwrap()
        };
        let mut hashes: Vec<String> = hashes.into_iter().map(hash).collect();
        // The hashes recorded by existing runs must not change.
        let bytes = [2_i64, 1 | 2 << 32, -1, -1].map(i64::to_le_bytes).concat();
        assert_eq!(hashes[0], format!("{:x}", Sha256::digest(bytes)));
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), 5);
    }
}
