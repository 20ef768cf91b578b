//! The partition plan: the cuts of a chain and their reasons, as a file and as a table.

use crate::cut::{min_device_memory_bytes, single_shard_bytes};
use crate::{Fingerprint, LayerCost, PartitionError, Profile, Rules, ShardMemory, TiedBuffer};
use hydra_core::{BUFFER_ALIGN, ByteSize, Chain, replace_file};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The version of the plan's format.
pub const PLAN_SCHEMA: u32 = 2;

/// A shard of a plan.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct ShardPlan {
    /// The first layer.
    pub first: usize,
    /// The layer after the last one.
    pub end: usize,
    /// Bytes of its buffers, each counted once.
    pub param_bytes: u64,
    /// Bytes of its parameters' gradients.
    pub gradient_bytes: u64,
    /// The predicted peak in bytes, including parameters.
    #[serde(alias = "need_bytes")]
    pub peak_bytes: u64,
    /// The predicted peak in bytes of its forward without a graph, including parameters.
    #[serde(alias = "forward_need_bytes")]
    pub forward_peak_bytes: u64,
    /// The measured peak in bytes of running the whole shard.
    pub verified_bytes: Option<u64>,
    /// The measured peak in bytes of its forward without a graph.
    #[serde(default)]
    pub verified_forward_bytes: Option<u64>,
    /// Seconds of its forward: the sum over its layers, or measured by verification.
    pub forward_s: f64,
    /// Seconds of its recomputed forward and backward, likewise.
    pub backward_s: f64,
}

impl ShardPlan {
    fn new(range: &Range<usize>, needs: &ShardMemory) -> Self {
        Self {
            first: range.start,
            end: range.end,
            param_bytes: needs.param_bytes,
            gradient_bytes: needs.gradient_bytes,
            peak_bytes: needs.peak_bytes(),
            forward_peak_bytes: needs.forward_peak_bytes(),
            verified_bytes: None,
            verified_forward_bytes: None,
            forward_s: needs.forward_s,
            backward_s: needs.backward_s,
        }
    }

    /// The shard's layers.
    pub fn range(&self) -> Range<usize> {
        self.first..self.end
    }

    /// The larger of the predicted and the measured peak, in bytes.
    pub fn most_bytes(&self) -> u64 {
        self.peak_bytes.max(self.verified_bytes.unwrap_or(0))
    }

    /// The same for its forward without a graph.
    pub fn most_forward_bytes(&self) -> u64 {
        self.forward_peak_bytes.max(self.verified_forward_bytes.unwrap_or(0))
    }
}

/// The cuts of a chain, for one microbatch on one kind of device, and everything that they follow from.
///
/// Its [`Display`](fmt::Display) is a table of the shards.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct PartitionPlan {
    /// The version of the format, [`PLAN_SCHEMA`].
    pub schema: u32,
    /// The fingerprint of what the plan depends on.
    pub fingerprint: Fingerprint,
    /// Whether memory was measured; otherwise it is estimated from shapes.
    pub measured: bool,
    /// The costs of the layers.
    pub layers: Vec<LayerCost>,
    /// The buffers that several layers share.
    pub tied: Vec<TiedBuffer>,
    /// Bytes that are always in use on the device.
    pub standing_bytes: u64,
    /// The first layer of every shard but the first.
    pub cut_points: Vec<usize>,
    /// The shards, in chain order.
    pub shards: Vec<ShardPlan>,
    /// The smallest budget in bytes with which the model can be trained, alone on a device.
    pub min_device_memory_bytes: u64,
    /// The smallest budget in bytes with which the model is uncut, alone on a device.
    pub single_shard_bytes: u64,
    /// The rules that the shards satisfy.
    pub rules: Rules,
}

impl PartitionPlan {
    /// An estimate of the maximum bytes of one promotion: a shard's parameters, its input and the gradient of
    /// its output. Targets count like the chain's inputs, and each buffer may be aligned to [`BUFFER_ALIGN`].
    pub fn promotion_bytes(&self) -> u64 {
        let sum = |parts: &[u64]| parts.iter().copied().fold(0, u64::saturating_add);
        let bytes = |shard: &ShardPlan| {
            let (first, last) = (&self.layers[shard.first], &self.layers[shard.end - 1]);
            let gaps = (shard.end - shard.first + self.tied.len()) * BUFFER_ALIGN;
            sum(&[shard.param_bytes, gaps as u64, first.input_bytes, last.output_gradient_bytes])
        };
        let inputs = self.layers.first().map_or(0, |layer| layer.input_bytes);
        sum(&[self.shards.iter().map(bytes).max().unwrap_or(0), inputs])
    }

    pub(crate) fn new(
        profile: &Profile,
        fingerprint: Fingerprint,
        rules: Rules,
        shards: &[Range<usize>],
    ) -> Self {
        let mut plan = Self {
            schema: PLAN_SCHEMA,
            fingerprint,
            measured: profile.measured,
            layers: profile.layers.clone(),
            tied: profile.tied.clone(),
            standing_bytes: profile.standing_bytes,
            cut_points: Vec::new(),
            shards: Vec::new(),
            min_device_memory_bytes: min_device_memory_bytes(profile),
            single_shard_bytes: single_shard_bytes(profile),
            rules,
        };
        plan.cut_again(profile, 0, shards);
        plan
    }

    /// Replaces the shards. The first `kept` are unchanged and keep their measurements.
    pub(crate) fn cut_again(&mut self, profile: &Profile, kept: usize, shards: &[Range<usize>]) {
        let new = |range: &Range<usize>| ShardPlan::new(range, &profile.shard_memory(range.clone()));
        self.shards.truncate(kept);
        self.shards.extend(shards.iter().skip(kept).map(new));
        self.cut_points = shards.iter().skip(1).map(|range| range.start).collect();
    }

    /// Bytes of a shard's forward and backward, without the bytes that are always in use on the device.
    pub fn without_standing(&self, shard: usize) -> [u64; 2] {
        let shard = &self.shards[shard];
        [shard.most_forward_bytes(), shard.most_bytes()].map(|need| need.saturating_sub(self.standing_bytes))
    }

    /// The layers of each shard.
    pub fn shards(&self) -> Vec<Range<usize>> {
        self.shards.iter().map(ShardPlan::range).collect()
    }

    /// The costs that the plan was made from, for cutting again under other rules without a pilot pass.
    pub fn profile(&self) -> Profile {
        Profile {
            layers: self.layers.clone(),
            tied: self.tied.clone(),
            standing_bytes: self.standing_bytes,
            measured: self.measured,
        }
    }

    /// Writes the plan as JSON with [`replace_file`], so that the file is never incomplete. There must be no
    /// other writer at the same time.
    ///
    /// # Errors
    /// [`PartitionError::Write`], naming the file.
    pub fn save(&self, path: &Path) -> Result<(), PartitionError> {
        self.write(path).map_err(|source| PartitionError::Write { path: path.to_owned(), source })
    }

    fn write(&self, path: &Path) -> std::io::Result<()> {
        let json = serde_json::to_vec_pretty(self)?;
        replace_file(path, |file| {
            file.write_all(&json)?;
            file.write_all(b"\n")
        })
    }

    /// Reads a plan.
    ///
    /// # Errors
    /// [`PartitionError::Read`] if the file is missing or unreadable, [`PartitionError::NotAPlan`] if it is
    /// not a plan, [`PartitionError::Schema`] if it has another version, [`PartitionError::Uncovered`] if its
    /// shards are not its layers and [`PartitionError::Inconsistent`] if their values do not follow from
    /// those of the layers, or violate the rules; all name the file.
    pub fn load(path: &Path) -> Result<Self, PartitionError> {
        #[derive(Deserialize)]
        struct Version {
            schema: u64,
        }
        let read = std::fs::read(path);
        let json = read.map_err(|source| PartitionError::Read { path: path.to_owned(), source })?;
        let not_a_plan = |source| PartitionError::NotAPlan { path: path.to_owned(), source };
        let version: Version = serde_json::from_slice(&json).map_err(not_a_plan)?;
        if version.schema != u64::from(PLAN_SCHEMA) {
            let found = version.schema;
            return Err(PartitionError::Schema { path: path.to_owned(), found, expected: PLAN_SCHEMA });
        }
        let plan: Self = serde_json::from_slice(&json).map_err(not_a_plan)?;
        if !plan.covers_layers() {
            return Err(PartitionError::Uncovered { path: path.to_owned(), layers: plan.layers.len() });
        }
        if !plan.follows_from_its_layers() {
            return Err(PartitionError::Inconsistent { path: path.to_owned() });
        }
        Ok(plan)
    }

    fn covers_layers(&self) -> bool {
        let starts = self.shards.iter().map(|shard| shard.first);
        let ends = || self.shards.iter().map(|shard| shard.end);
        starts.clone().eq(std::iter::once(0).chain(ends()).take(self.shards.len()))
            && starts.skip(1).eq(self.cut_points.iter().copied())
            && self.shards.iter().all(|shard| shard.first < shard.end)
            && ends().next_back().unwrap_or(0) == self.layers.len()
    }

    /// Returns whether the plan follows from its layers, rules and cut-points, apart from measurements of its
    /// shards.
    fn follows_from_its_layers(&self) -> bool {
        let profile = self.profile();
        let mut again = Self::new(&profile, self.fingerprint.clone(), self.rules, &self.shards());
        for (again, shard) in again.shards.iter_mut().zip(&self.shards) {
            again.verified_bytes = shard.verified_bytes;
            again.verified_forward_bytes = shard.verified_forward_bytes;
            (again.forward_s, again.backward_s) = (shard.forward_s, shard.backward_s);
        }
        let Rules { budget, reserve, .. } = self.rules;
        let tolerated = |shard: &ShardPlan| {
            let mut peaks = shard.verified_bytes.iter().chain(&shard.verified_forward_bytes);
            peaks.all(|peak| self.rules.tolerates(*peak))
        };
        again == *self
            && (budget, reserve) == (self.fingerprint.budget, self.fingerprint.reserve)
            && self.fingerprint.cuts.as_ref().is_none_or(|cuts| *cuts == self.cut_points)
            && self
                .shards
                .iter()
                .all(|shard| self.rules.fits(&profile.shard_memory(shard.range())) && tolerated(shard))
    }

    /// Checks that the plan's layers are those of `chain`, by name and in order.
    ///
    /// # Errors
    /// [`PartitionError::OtherChain`] with both lists.
    pub fn check_layers(&self, chain: &Chain) -> Result<(), PartitionError> {
        let expected: Vec<String> = self.layers.iter().map(|layer| layer.name.clone()).collect();
        let found: Vec<String> = chain.layers().iter().map(|layer| layer.name.clone()).collect();
        if expected == found {
            return Ok(());
        }
        Err(PartitionError::OtherChain { chain: chain.name().to_owned(), expected, found })
    }

    /// Returns the plan with this fingerprint in `path`, which is a plan's file or a directory whose `*.json`
    /// files are searched in order of their names. `None` if there is none; if `path` is a single plan, the
    /// differences are logged, as a warning if its costs cannot be used either.
    ///
    /// # Errors
    /// Those of [`load`](Self::load) for a file. In a directory, files that are not plans are skipped
    /// with a warning; a directory that cannot be listed is a [`PartitionError::Read`].
    pub fn find(path: &Path, fingerprint: &Fingerprint) -> Result<Option<Self>, PartitionError> {
        let plans = plans_in(path)?;
        if let [plan] = plans.as_slice()
            && plan.fingerprint != *fingerprint
        {
            let (path, differences) = (path.display(), fingerprint.differences(&plan.fingerprint).join("; "));
            // The free memory varies, so a resumed run without an explicit budget is cut again.
            match fingerprint.same_costs(&plan.fingerprint) {
                true => {
                    tracing::info!("the plan in {path} is cut again from its measurements: {differences}")
                }
                false => tracing::warn!("the plan in {path} does not fit this run: {differences}"),
            }
        }
        Ok(plans.into_iter().find(|plan| plan.fingerprint == *fingerprint))
    }

    /// Returns the costs of a plan in `path` whose fingerprint has the [`same
    /// costs`](Fingerprint::same_costs), for cutting under another budget or double buffer without a pilot
    /// pass. Errors are those of [`find`](Self::find).
    pub fn find_profile(path: &Path, fingerprint: &Fingerprint) -> Result<Option<Profile>, PartitionError> {
        let same = |plan: &Self| fingerprint.same_costs(&plan.fingerprint);
        Ok(plans_in(path)?.into_iter().find(same).map(|plan| plan.profile()))
    }

    fn row(&self, index: usize, shard: &ShardPlan) -> [String; COLUMNS] {
        let size = |bytes: u64| ByteSize(bytes).to_string();
        let saved =
            self.layers[shard.range()].iter().map(|layer| layer.saved_bytes).fold(0, u64::saturating_add);
        let name = |layer: usize| self.layers[layer].name.as_str();
        let layers = match shard.end - shard.first {
            1 => name(shard.first).to_owned(),
            n => format!("{}..{} ({n})", name(shard.first), name(shard.end - 1)),
        };
        [
            index.to_string(),
            layers,
            size(shard.param_bytes),
            size(shard.gradient_bytes),
            size(saved),
            size(shard.peak_bytes),
            shard.verified_bytes.map_or_else(|| "-".to_owned(), size),
            format!("{:.2} ms", shard.forward_s * 1e3),
            format!("{:.2} ms", shard.backward_s * 1e3),
        ]
    }
}

/// Returns the plan in a file, or the plans in a directory in order of their names.
fn plans_in(path: &Path) -> Result<Vec<PartitionPlan>, PartitionError> {
    if !path.is_dir() {
        return Ok(vec![PartitionPlan::load(path)?]);
    }
    let files = json_files(path).map_err(|source| PartitionError::Read { path: path.to_owned(), source })?;
    let load = |file: PathBuf| {
        PartitionPlan::load(&file)
            .inspect_err(|error| tracing::warn!("{} is skipped: {error}", file.display()))
            .ok()
    };
    Ok(files.into_iter().filter_map(load).collect())
}

fn json_files(directory: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let file = entry?.path();
        if file.extension().is_some_and(|extension| extension == "json") {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

const COLUMNS: usize = 9;
const HEADINGS: [&str; COLUMNS] =
    ["shard", "layers", "params", "gradients", "saved", "peak", "verified", "forward", "backward"];

impl fmt::Display for PartitionPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (budget, reserve) = (ByteSize(self.rules.budget), ByteSize(self.rules.reserve));
        writeln!(
            f,
            "{} shard(s) of {} layers, {}: {budget} of device memory, including a double buffer of {reserve} \
             and a margin of {}; trains from {}, uncut from {}",
            self.shards.len(),
            self.layers.len(),
            if self.measured { "measured" } else { "estimated from shapes" },
            ByteSize(self.rules.margin),
            ByteSize(self.min_device_memory_bytes).at_least(),
            ByteSize(self.single_shard_bytes).at_least(),
        )?;
        let mut rows = vec![HEADINGS.map(str::to_owned)];
        rows.extend(self.shards.iter().enumerate().map(|(index, shard)| self.row(index, shard)));
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        for row in &rows {
            let cells = row.iter().enumerate().map(|(column, cell)| match column {
                1 => format!("{cell:<w$}", w = width(column)),
                _ => format!("{cell:>w$}", w = width(column)),
            });
            writeln!(f, "{}", cells.collect::<Vec<_>>().join("  "))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{InitialValues, PilotPartitioner, toy};
    use hydra_core::UNFINISHED;

    /// Three layers and a loss, two of the layers in a shard.
    fn plan(budget: u64) -> PartitionPlan {
        let (chain, batch) = (toy::chain(3), toy::batch(2));
        let buffers = InitialValues::new(&chain, 0);
        let partitioner = PilotPartitioner::new(&buffers);
        let mut profile = partitioner.measure(&chain, &batch, &toy::BLIND).unwrap();
        profile.layers.iter_mut().for_each(|layer| (layer.forward_s, layer.backward_s) = (0.25, 1.5));
        let fingerprint = Fingerprint::new(&chain, &batch, "").on(2, "none");
        partitioner.plan(&profile, fingerprint, Rules::new(budget, 2048, false), None).unwrap()
    }

    #[test]
    fn a_plan_survives_its_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("toy.json");
        let plan = plan(1 << 20);
        plan.save(&path).unwrap();
        // The unfinished file of a killed process is replaced by the next write.
        std::fs::write(directory.path().join(format!("toy.json{UNFINISHED}")), "half").unwrap();
        plan.save(&path).unwrap();
        assert_eq!(PartitionPlan::load(&path).unwrap(), plan);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
        assert_eq!(plan.shards(), [0..2, 2..4]);
        assert_eq!(plan.cut_points, [2]);
        assert_eq!(plan.fingerprint.reserve, 2048);
    }

    #[test]
    fn what_is_wrong_with_a_file_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("p.json");
        let fails = |expected: &str| {
            let error = PartitionPlan::load(&path).unwrap_err();
            let message = error.to_string();
            assert!(message.contains("p.json") && message.contains(expected), "{message}");
            assert!(PartitionPlan::find(&path, &plan(1 << 20).fingerprint).is_err());
        };
        fails("could not be read");
        std::fs::write(&path, "[1, 2").unwrap();
        fails("is not a partition plan");
        std::fs::write(&path, r#"{"schema": 2, "shards": []}"#).unwrap();
        fails("is not a partition plan");
        std::fs::write(&path, r#"{"schema": 99}"#).unwrap();
        fails("has schema 99, expected 2");
        std::fs::write(&path, r#"{"schema": 1}"#).unwrap();
        fails("has schema 1, expected 2");
        let good = plan(1 << 20);
        for break_it in [
            |p: &mut PartitionPlan| p.shards[1].first = 1,
            |p: &mut PartitionPlan| p.shards[1].end = 3,
            |p: &mut PartitionPlan| p.cut_points.clear(),
            |p: &mut PartitionPlan| p.shards.clear(),
        ] {
            let mut bad = good.clone();
            break_it(&mut bad);
            bad.save(&path).unwrap();
            fails("do not cover its 4 layers");
        }
        for break_it in [
            |p: &mut PartitionPlan| p.shards[0].peak_bytes -= 1,
            |p: &mut PartitionPlan| p.shards[1].param_bytes = u64::MAX,
            |p: &mut PartitionPlan| p.shards[1].verified_bytes = Some(u64::MAX),
            |p: &mut PartitionPlan| p.layers[0].peak_bytes = u64::MAX,
            |p: &mut PartitionPlan| p.tied = vec![TiedBuffer { bytes: u64::MAX, layers: vec![0, 1] }; 2],
            |p: &mut PartitionPlan| p.rules.reserve = 1024,
            |p: &mut PartitionPlan| (p.rules.reserve, p.fingerprint.reserve) = (1024, 1024),
            |p: &mut PartitionPlan| (p.rules.budget, p.fingerprint.budget) = (1 << 18, 1 << 18),
            |p: &mut PartitionPlan| p.fingerprint.budget += 1,
            |p: &mut PartitionPlan| p.fingerprint.cuts = Some(vec![1]),
            |p: &mut PartitionPlan| p.min_device_memory_bytes = 1,
        ] {
            let mut bad = good.clone();
            break_it(&mut bad);
            assert!(bad.promotion_bytes() > 0 && bad.to_string().starts_with("2 shard(s)"));
            bad.save(&path).unwrap();
            fails("are not those that its layers and rules give");
        }
        good.save(&path).unwrap();
        for (found, other) in [("1.5", "1e999"), ("1.5", "null"), ("2048", "-1"), ("2048", "1e400")] {
            let text = std::fs::read_to_string(&path).unwrap();
            std::fs::write(&path, text.replacen(found, other, 1)).unwrap();
            fails("is not a partition plan");
            good.save(&path).unwrap();
        }
        let nowhere = directory.path().join("none/p.json");
        assert!(good.save(&nowhere).unwrap_err().to_string().contains("none"));
    }

    #[test]
    fn a_promotion_is_that_of_the_largest_shard() {
        let plan = plan(1 << 20);
        let [large, small] = plan.shards.as_slice() else { panic!("{plan}") };
        assert_eq!((large.param_bytes, small.param_bytes), (2048, 1024));
        // Its parameters with alignment, its input, the gradient of its output, and targets.
        let boundary = plan.layers[1].input_bytes;
        assert_eq!(plan.promotion_bytes(), 2048 + 2 * BUFFER_ALIGN as u64 + 3 * boundary);
    }

    #[test]
    fn a_plan_is_found_by_its_fingerprint() {
        let directory = tempfile::tempdir().unwrap();
        let (small, large) = (plan(1 << 20), plan(2 << 20));
        small.save(&directory.path().join("a.json")).unwrap();
        large.save(&directory.path().join("b.json")).unwrap();
        std::fs::write(directory.path().join("aa.json"), "no plan").unwrap();
        std::fs::write(directory.path().join("notes.txt"), "no plan").unwrap();
        let find = |fingerprint| PartitionPlan::find(directory.path(), fingerprint).unwrap();
        assert_eq!(find(&large.fingerprint), Some(large.clone()));
        let other = large.fingerprint.clone().under(3 << 20, 2048);
        assert_eq!(find(&other), None);
        assert_eq!(PartitionPlan::find(&directory.path().join("a.json"), &other).unwrap(), None);
        let costs = |fingerprint| PartitionPlan::find_profile(directory.path(), fingerprint).unwrap();
        assert_eq!(costs(&other), Some(small.profile()));
        assert_eq!(costs(&large.fingerprint.clone().on(7, "none")), None);
    }

    #[test]
    fn the_table_has_a_row_for_each_shard() {
        let mut plan = plan(1 << 20);
        plan.shards[1].verified_bytes = Some(3 << 20);
        (plan.min_device_memory_bytes, plan.single_shard_bytes) = (2_296_478, 2_306_868);
        let table = plan.to_string();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 4);
        assert!(lines[0].starts_with("2 shard(s) of 4 layers, estimated from shapes: 1.00 MiB"), "{table}");
        assert!(lines[0].ends_with("trains from 2.20 MiB, uncut from 2.21 MiB"), "{table}");
        assert!(lines[1].split_whitespace().eq(HEADINGS), "{table}");
        assert!(lines[2].contains("l0..l1 (2)") && lines[2].contains("500.00 ms"), "{table}");
        assert!(lines[3].contains("l2..loss (2)") && lines[3].contains("3.00 MiB"), "{table}");
        assert_eq!(lines[1].len(), lines[2].len());
    }
}
