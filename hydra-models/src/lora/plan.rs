//! Resolves adapter settings for the modules of a model.

use super::targets::{LayerMatcher, Matcher, Modules, Patterns, Targets, ends_with, matches, regex};
use super::{Base, Bias, CLASSIFIERS, Lora, LoraInit, TokenRows};
use crate::ModelError;
use crate::family::supported::refuse;
use crate::family::{Adapting, TaskType};
use fancy_regex::Regex;
use hydra_core::Chain;
use std::collections::{BTreeMap, BTreeSet};

/// The names by which PEFT recognizes embedding and head in `modules_to_save`.
const EMBEDDINGS: [&str; 2] = ["embed_tokens", "lm_head"];

/// The adapters and trained parameters of a model. Keys are names in the chain.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) lora: Lora,
    /// The adapted modules, by their weights' names without `.weight`.
    adapters: BTreeMap<String, RankAndScale>,
    /// The base parameters that are trained.
    trained: BTreeSet<String>,
    /// Those of them that adapter files must contain.
    saved: BTreeSet<String>,
    /// Individually replaced rows of tables, by the table's Transformers name.
    pub(super) rows: BTreeMap<String, Vec<usize>>,
    /// Whether embedding and head share a table.
    pub(super) shared: bool,
    /// Whether that table is trained in full.
    tied: bool,
    notes: Vec<String>,
}

/// The rank and scale of an adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RankAndScale {
    pub rank: usize,
    pub scale: f64,
}

/// A base layer's parameters and adaptable modules.
pub(super) struct AdaptableLayer {
    /// Parameter names in the chain.
    pub params: Vec<String>,
    /// The adaptable linear modules, by name in the chain, with their input and output widths.
    pub maps: Vec<(String, [usize; 2])>,
}

impl Plan {
    /// Resolves `lora` for a model of these layers. If `strict`, each target must match a module.
    ///
    /// # Errors
    /// Invalid numbers or expressions, and modules that do not exist or cannot be adapted.
    pub(super) fn new(
        lora: &Lora,
        adapting: &Adapting,
        layers: &[AdaptableLayer],
        strict: bool,
    ) -> Result<Self, ModelError> {
        lora.validate()?;
        let modules = Tree::new(adapting, layers);
        let mut notes = Vec::new();
        let adapters = modules.adapters(lora, adapting, strict, &mut notes)?;
        let mut plan = Self {
            lora: lora.clone(),
            adapters,
            trained: BTreeSet::new(),
            saved: BTreeSet::new(),
            rows: modules.rows(&lora.tokens, adapting)?,
            shared: adapting.tied && !unties(lora, adapting),
            tied: false,
            notes,
        };
        plan.save(&modules, adapting, strict)?;
        plan.train_biases(&modules);
        let weight = |map: &&String| plan.quantizes(map) && plan.trained.contains(&format!("{map}.weight"));
        match modules.names.values().flatten().map(|(map, _)| map).find(weight) {
            Some(map) => Err(refuse(
                "modules_to_save",
                format!("`{}`", lora.modules_to_save.join("`, `")),
                format!("names without the quantized matrix `{map}`: with --base nf4 train an adapter of it"),
            )),
            None => Ok(plan),
        }
    }

    /// Marks the modules that are trained in full.
    fn save(&mut self, modules: &Tree, adapting: &Adapting, strict: bool) -> Result<(), ModelError> {
        let names = &self.lora.modules_to_save;
        let classifies = adapting.task == TaskType::SequenceClassification.peft_name();
        let is_absent = |name: &&String| {
            let implied = classifies && CLASSIFIERS.contains(&name.as_str());
            !implied && !modules.names.keys().any(|key| key.ends_with(name.as_str()))
        };
        for name in names.iter().filter(is_absent) {
            if strict {
                let expected = format!("module names, such as {}", modules.last_parts());
                return Err(refuse("modules_to_save", format!("`{name}`"), expected));
            }
            self.notes.push(format!("`modules_to_save` has `{name}`, which matches no module of the model"));
        }
        let tied = self.lora.ensure_weight_tying && is_embedding_saved(names) && adapting.tied;
        self.tied = tied;
        if self.lora.ensure_weight_tying && !tied {
            self.notes.push(
                "`ensure_weight_tying` has no effect: no shared table of the model is trained in full"
                    .to_owned(),
            );
        }
        for (param, module) in &modules.params {
            let shared = tied && (module == adapting.embedding || module == adapting.head);
            if !(is_saved(names, module) || shared) {
                continue;
            }
            let map = param.rsplit_once('.').map_or("", |(map, _)| map);
            if self.adapters.contains_key(map) {
                return Err(refuse(
                    "modules_to_save",
                    format!("`{}`", names.join("`, `")),
                    format!("names without `{module}`, which has an adapter"),
                ));
            }
            self.trained.insert(param.clone());
            self.saved.insert(param.clone());
        }
        Ok(())
    }

    fn train_biases(&mut self, modules: &Tree) {
        for param in modules.params.keys() {
            let Some(map) = param.strip_suffix(".bias") else { continue };
            let trained = match self.lora.bias {
                Bias::None => false,
                Bias::All => true,
                Bias::LoraOnly => self.adapters.contains_key(map),
            };
            if trained {
                self.trained.insert(param.clone());
            }
        }
    }

    /// The adapter of a module, by its name in the chain.
    pub(crate) fn adapter(&self, map: &str) -> Option<RankAndScale> {
        self.adapters.get(map).copied()
    }

    /// The adapters of all modules.
    pub(crate) fn adapters(&self) -> impl Iterator<Item = RankAndScale> {
        self.adapters.values().copied()
    }

    /// What changes the model besides products of two matrices that are added to its own, if anything does.
    pub(crate) fn besides_adapters(&self) -> Option<String> {
        if let Some(param) = self.trained.first() {
            return Some(format!("`{param}`, which is trained in full"));
        }
        if let Some(table) = self.rows.keys().next() {
            return Some(format!("single rows of `{table}`"));
        }
        if self.lora.lora_bias {
            return Some("the bias of an adapter (`lora_bias`)".to_owned());
        }
        let takes = self.adapters.keys().any(|map| self.taken_from(&format!("{map}.weight")).is_some());
        takes.then(|| {
            "adapters whose initial values are subtracted from the weights (PiSSA, OLoRA)".to_owned()
        })
    }

    /// The adapter whose initial values are subtracted from the weight of this name in the chain.
    pub(super) fn taken_from(&self, param: &str) -> Option<RankAndScale> {
        let takes = matches!(self.lora.init, LoraInit::Pissa | LoraInit::Olora);
        self.adapter(param.strip_suffix(".weight")?).filter(|_| takes)
    }

    /// Returns whether a base parameter is trained, by its name in the chain.
    pub(super) fn trains(&self, param: &str) -> bool {
        self.trained.contains(param)
    }

    /// Returns whether the linear module of this name in the chain is quantized: all are, but those of the head.
    pub(super) fn quantizes(&self, map: &str) -> bool {
        self.lora.base == Base::Nf4 && !map.starts_with("head.")
    }

    /// Returns whether adapter files must contain this base parameter.
    pub(super) fn saves(&self, param: &str) -> bool {
        self.saved.contains(param)
    }

    /// Rejects merging an adapter with a bias into a module of `plain` without one.
    pub(super) fn check_biases(&self, plain: &Chain) -> Result<(), ModelError> {
        let params: BTreeSet<&str> = plain
            .buffers()
            .iter()
            .flat_map(|buffer| &buffer.params)
            .map(|param| param.name.as_str())
            .collect();
        let without = self.adapters.keys().find(|map| !params.contains(format!("{map}.bias").as_str()));
        without.map_or(Ok(()), |map| {
            let expected =
                format!("false if adapters are merged: `{map}` has no bias to add to; omit --merge");
            Err(refuse("lora_bias", "true", expected))
        })
    }

    /// Settings that have no effect on the model.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Checks that the adapters can be trained, not only evaluated and merged.
    ///
    /// # Errors
    /// Individually replaced rows of tables, or a shared table that is trained as one.
    pub fn check_trainable(&self) -> Result<(), ModelError> {
        if self.tied {
            let expected = "false for training: a table shared by embedding and head cannot be saved with adapters; \
                            evaluate these adapters with `hydra eval`";
            return Err(refuse("ensure_weight_tying", "true", expected));
        }
        match self.rows.is_empty() {
            true => Ok(()),
            false => Err(refuse(
                "trainable_token_indices",
                "set",
                "no value for training: single rows of a table cannot be trained; evaluate these adapters with `hydra \
                 eval`, or name the embedding in `modules_to_save` to train it in full",
            )),
        }
    }
}

/// Returns whether a module is trained in full, or is inside one that is.
fn is_saved(names: &[String], module: &str) -> bool {
    ancestors(module).any(|key| names.iter().any(|name| key.ends_with(name.as_str())))
}

fn is_embedding_saved(names: &[String]) -> bool {
    names.iter().any(|name| EMBEDDINGS.contains(&name.rsplit('.').next().unwrap_or(name)))
}

/// Returns whether these settings give embedding and head of a model with a shared table their own tables.
pub(crate) fn unties(lora: &Lora, adapting: &Adapting) -> bool {
    let names = &lora.modules_to_save;
    let kept = lora.ensure_weight_tying && is_embedding_saved(names);
    let saved = [adapting.embedding, adapting.head].iter().any(|module| is_saved(names, module));
    adapting.tied && saved && !kept
}

/// A module's name and those of the modules that contain it, outermost first.
fn ancestors(module: &str) -> impl Iterator<Item = &str> {
    let ends = module.match_indices('.').map(|(at, _)| at).chain([module.len()]);
    ends.map(|end| &module[..end])
}

/// The modules of a model.
struct Tree {
    /// Parameters by name in the chain, with their modules' Transformers names.
    params: BTreeMap<String, String>,
    /// All modules by Transformers name; for adaptable ones, the name in the chain and the widths.
    names: BTreeMap<String, Option<(String, [usize; 2])>>,
    /// Adaptable modules, in model order.
    maps: Vec<String>,
}

/// Selects the modules to adapt.
struct Chooser {
    exclude: Option<Matcher>,
    saved: Vec<Regex>,
    layers: Option<LayerMatcher>,
    targets: Option<Matcher>,
}

impl Chooser {
    fn new(lora: &Lora, adapting: &Adapting) -> Result<Self, ModelError> {
        let family = || adapting.targets.iter().map(|target| (adapting.target)(target).to_owned()).collect();
        let targets = match &lora.targets {
            Targets::Family => Some(Modules::Names(family())),
            Targets::Names(names) => Some(Modules::Names(names.clone())),
            Targets::Pattern(pattern) => Some(Modules::Pattern(pattern.clone())),
            Targets::AllLinear => None,
        };
        let saved = lora.modules_to_save.iter();
        let saved = saved.map(|name| regex("modules_to_save", r"\A(?:(^|.*\.){}($|\..*))", name));
        Ok(Self {
            exclude: lora.exclude.as_ref().map(|e| Matcher::new("exclude_modules", e)).transpose()?,
            saved: saved.collect::<Result<_, _>>()?,
            layers: lora.layers.as_ref().map(LayerMatcher::new).transpose()?,
            targets: targets.as_ref().map(|targets| Matcher::new("target_modules", targets)).transpose()?,
        })
    }

    fn excludes(&self, module: &str) -> bool {
        self.exclude.as_ref().is_some_and(|exclude| exclude.has(module))
    }

    fn takes(&self, module: &str, is_map: bool) -> bool {
        let excluded = self.excludes(module) || self.saved.iter().any(|saved| matches(saved, module));
        let targeted = self.targets.as_ref().map_or(is_map, |targets| targets.has(module));
        targeted && !excluded && self.layers.as_ref().is_none_or(|layers| layers.has(module))
    }
}

impl Tree {
    fn new(adapting: &Adapting, layers: &[AdaptableLayer]) -> Self {
        let module = |param: &str| {
            let name = (adapting.name)(param);
            name.rsplit_once('.').map_or_else(String::new, |(module, _)| module.to_owned())
        };
        let params = layers.iter().flat_map(|layer| &layer.params);
        let params: BTreeMap<String, String> = params.map(|param| (param.clone(), module(param))).collect();
        let mut names = BTreeMap::new();
        for module in params.values() {
            names.extend(ancestors(module).map(|key| (key.to_owned(), None)));
        }
        let mut maps = Vec::new();
        for (map, shape) in layers.iter().flat_map(|layer| &layer.maps) {
            let name = module(&format!("{map}.weight"));
            names.insert(name.clone(), Some((map.clone(), *shape)));
            maps.push(name);
        }
        Self { params, names, maps }
    }

    fn adapters(
        &self,
        lora: &Lora,
        adapting: &Adapting,
        strict: bool,
        notes: &mut Vec<String>,
    ) -> Result<BTreeMap<String, RankAndScale>, ModelError> {
        let chooser = Chooser::new(lora, adapting)?;
        let ranks = Patterns::new("rank_pattern", &lora.rank_pattern)?;
        let alphas = Patterns::new("alpha_pattern", &lora.alpha_pattern)?;
        let (mut adapters, mut adapted) = (BTreeMap::new(), Vec::new());
        for (module, map) in self.names.iter().filter(|(module, map)| chooser.takes(module, map.is_some())) {
            let Some((map, shape)) = map else { return Err(self.not_a_map(module)) };
            let (rank, alpha) =
                (ranks.get(module).unwrap_or(lora.rank), alphas.get(module).unwrap_or(lora.alpha));
            check_taken(lora, adapting, module, rank, *shape)?;
            adapters.insert(map.clone(), RankAndScale { rank, scale: lora.scale_of(rank, alpha) });
            adapted.push(module.as_str());
        }
        self.check_named(&lora.targets, strict || adapters.is_empty())?;
        if adapters.is_empty() {
            return Err(refuse(
                "lora targets",
                format!("{:?}", lora.targets),
                "at least one matching module",
            ));
        }
        let unused: [(&str, Vec<&str>); 2] = [
            ("rank_pattern", ranks.unused(&adapted).collect()),
            ("alpha_pattern", alphas.unused(&adapted).collect()),
        ];
        for (field, keys) in unused.iter().filter(|(_, keys)| !keys.is_empty()) {
            notes.push(format!("`{field}` has `{}`, which matches no adapted module", keys.join("`, `")));
        }
        if lora.exclude.is_some() && !self.names.keys().any(|module| chooser.excludes(module)) {
            notes.push("`exclude_modules` matches no module of the model".to_owned());
        }
        Ok(adapters)
    }

    fn not_a_map(&self, module: &str) -> ModelError {
        refuse(
            "target_modules",
            format!("matched by `{module}`"),
            format!(
                "linear modules, such as {}: embeddings, language model heads, convolutions and module groups cannot have \
                 adapters in Hydra; merge them with PEFT's `merge_and_unload`, or name them in `modules_to_save`",
                self.last_parts()
            ),
        )
    }

    /// Rejects the first target that matches no module.
    fn check_named(&self, targets: &Targets, needed: bool) -> Result<(), ModelError> {
        let maps = || self.maps.iter();
        let expected = || format!("some of {}", self.last_parts());
        match targets {
            _ if !needed => Ok(()),
            Targets::Names(names) if names.is_empty() => Err(refuse("lora targets", "missing", expected())),
            Targets::Names(names) => {
                let unknown = names.iter().find(|name| !maps().any(|map| ends_with(map, name)));
                unknown.map_or(Ok(()), |name| Err(refuse("lora targets", format!("`{name}`"), expected())))
            }
            Targets::Pattern(pattern) if !maps().any(|map| pattern_has(pattern, map)) => Err(refuse(
                "lora targets",
                format!("`{pattern}`"),
                format!("a regular expression that matches {}", expected()),
            )),
            _ => Ok(()),
        }
    }

    /// The last name components of the adaptable modules.
    fn last_parts(&self) -> String {
        let mut parts: Vec<&str> = Vec::new();
        for name in &self.maps {
            let last = name.rsplit('.').next().unwrap_or(name);
            if !parts.contains(&last) {
                parts.push(last);
            }
        }
        parts.join(", ")
    }

    /// Individually replaced rows, by the table's module.
    fn rows(
        &self,
        tokens: &[TokenRows],
        adapting: &Adapting,
    ) -> Result<BTreeMap<String, Vec<usize>>, ModelError> {
        let mut rows: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for TokenRows { module, rows: these } in tokens {
            let tables = [adapting.embedding, adapting.head];
            let is = |table: &&str| module.as_ref().is_none_or(|module| table.ends_with(module.as_str()));
            let Some(table) = tables.into_iter().filter(|table| self.names.contains_key(*table)).find(is)
            else {
                let found = module.as_deref().unwrap_or("set");
                return Err(refuse(
                    "trainable_token_indices",
                    format!("`{found}`"),
                    format!("rows of {}", tables.join(" or ")),
                ));
            };
            // A shared table has one set of rows.
            let table = if adapting.tied { adapting.embedding } else { table };
            if rows.insert(table.to_owned(), these.clone()).is_some_and(|others| others != *these) {
                let expected = "the same rows for embedding and head, which share a table";
                return Err(refuse("trainable_token_indices", "different", expected));
            }
        }
        Ok(rows)
    }
}

fn pattern_has(pattern: &str, map: &str) -> bool {
    Matcher::new("target_modules", &Modules::Pattern(pattern.to_owned()))
        .is_ok_and(|matcher| matcher.has(map))
}

/// Rejects an adapter whose initial values cannot be taken from the base weight.
fn check_taken(
    lora: &Lora,
    adapting: &Adapting,
    module: &str,
    rank: usize,
    [inputs, outputs]: [usize; 2],
) -> Result<(), ModelError> {
    let widest = inputs.min(outputs);
    match lora.init {
        LoraInit::Olora if adapting.fan_in_fan_out => Err(refuse(
            "init_lora_weights",
            "olora",
            "another initialization: PEFT decomposes this model's `Conv1D` weights transposed",
        )),
        LoraInit::Pissa | LoraInit::Olora if rank > widest => Err(refuse(
            "lora rank",
            rank,
            format!("at most {widest}, which `{module}` has for `init_lora_weights`"),
        )),
        _ => Ok(()),
    }
}
