//! Models and data that the embedding program brings: a command finds them by the names in its arguments.
//!
//! The names begin with [`PREFIX`], so that a command which lacks the program is refused instead of reading a file.

use crate::settings::{ModelSettings, is_own};
use crate::terminal::Usage;
use anyhow::Result;
use hydra_core::FloatType;
use hydra_models::data::{Content, LossOn};
use hydra_models::family::Model;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ThreadId};

/// A model with its data. The names are those of `--model` and `--data`, and both begin with `torch:`.
pub struct OwnModel {
    /// The name of the model, which identifies its architecture and its initial weights.
    pub model: String,
    /// The name of the data, which identifies its content.
    pub data: String,
    /// Returns the model.
    pub build: Box<dyn Fn() -> Box<dyn Model> + Send + Sync>,
    /// The training, validation and test data; training data is required.
    pub splits: [Option<Arc<dyn Content>>; 3],
}

/// The models of running commands, each with the thread of its command.
static MODELS: Mutex<Vec<(ThreadId, Arc<OwnModel>)>> = Mutex::new(Vec::new());

/// A model that the command on this thread finds while this exists.
pub struct Registered(Arc<OwnModel>);

impl Registered {
    /// Makes the model available to the commands of this thread until the value is dropped.
    pub fn new(model: Arc<OwnModel>) -> Self {
        models().push((thread::current().id(), Arc::clone(&model)));
        Self(model)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mut models = models();
        if let Some(at) = models.iter().position(|(_, model)| Arc::ptr_eq(model, &self.0)) {
            models.remove(at);
        }
    }
}

fn models() -> std::sync::MutexGuard<'static, Vec<(ThreadId, Arc<OwnModel>)>> {
    MODELS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the embedding program's model of these settings, or `None` if they name another kind of model.
///
/// # Errors
/// A name of such a model or of such data that no program has brought, or that several other commands have brought, and settings
/// that do not apply to them.
pub(super) fn find(spec: &ModelSettings) -> Result<Option<Arc<OwnModel>>, Usage> {
    let (model, data) = (spec.name(), spec.text());
    if !is_own(model) && !is_own(data) {
        return Ok(None);
    }
    let models = models();
    // Equal names do not mean equal models: a name has what can be read of a module and of the data, which is not all.
    let named = || models.iter().filter(|(_, own)| own.model == model && own.data == data);
    let of_command = named().find(|(thread, _)| *thread == thread::current().id());
    let Some((_, found)) = of_command.or_else(|| named().next()).cloned() else {
        let mut known: Vec<String> =
            models.iter().map(|(_, own)| format!("`{}` with `{}`", own.model, own.data)).collect();
        known.dedup();
        let known = if known.is_empty() {
            "this program has none".to_owned()
        } else {
            format!("this program has {}", known.join(", "))
        };
        return Err(Usage::new(format!(
            "`{model}` with the data `{data}` is a model of a Python program, and {known}: resume the run in Python, with the \
             same modules, initial weights and data: hydra_train.resume(dir, model=chain, data=dataset)"
        )));
    };
    if of_command.is_none() && named().count() > 1 {
        return Err(Usage::new(format!(
            "several commands of this program use a model named `{model}`: start one when the other has ended"
        )));
    }
    check(spec)?;
    Ok(Some(found))
}

/// Fails on settings of Hydra's own models and of its readers.
fn check(spec: &ModelSettings) -> Result<(), Usage> {
    let given = [
        ("--task", spec.task.is_some()),
        ("--loss", spec.loss.is_some()),
        ("--beta", spec.beta.is_some()),
        ("--gamma", spec.gamma.is_some()),
        ("--problem-type", spec.problem_type.is_some()),
        ("--columns", !spec.columns.is_empty()),
        ("--context", spec.context.is_some()),
        ("--loss-on", spec.loss_on != LossOn::default()),
        ("--pack", spec.pack),
        ("--tokenizer", spec.tokenizer.is_some()),
        ("--dropout", spec.dropout.is_some()),
        ("--vocabulary-parts", spec.vocabulary_parts.is_some()),
        ("--train", !spec.train.is_empty()),
        ("--dtype", spec.dtype != FloatType::F32),
        ("--frozen-dtype", spec.frozen_dtype.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        Some((flag, _)) => Err(Usage::new(format!(
            "{flag} does not apply to `{}`, whose modules and data are a Python program's: omit it",
            spec.name()
        ))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_models::family;

    fn own(model: &str) -> Arc<OwnModel> {
        let build = Box::new(|| family::load("bytes-tiny").unwrap());
        let splits = [None, None, None];
        Arc::new(OwnModel { model: model.to_owned(), data: "torch:rows".to_owned(), build, splits })
    }

    fn settings(model: &str, data: &str) -> ModelSettings {
        let (model, data) = (Some(model.to_owned()), Some(data.to_owned()));
        ModelSettings { model, data, ..crate::settings::flags::defaults() }
    }

    #[test]
    fn a_model_is_found_by_both_names_while_its_command_runs() {
        let found = |model: &str, data: &str| find(&settings(model, data)).map(|found| found.is_some());
        assert!(!found("bytes-tiny", "builtin").unwrap());
        let registered = [Registered::new(own("torch:a")), Registered::new(own("torch:a"))];
        assert!(found("torch:a", "torch:rows").unwrap());
        for [model, data] in [["torch:a", "builtin"], ["torch:b", "torch:rows"], ["gpt2", "torch:rows"]] {
            let error = found(model, data).unwrap_err().to_string();
            assert!(error.contains(model) && error.contains("resume(dir, model=chain"), "{error}");
        }
        let [first, second] = registered;
        drop(first);
        assert!(found("torch:a", "torch:rows").unwrap(), "another command has it");
        drop(second);
        assert!(found("torch:a", "torch:rows").is_err());
    }

    #[test]
    fn commands_with_equal_names_find_their_own_models() {
        let settings = settings("torch:same", "torch:rows");
        let found = |own: Arc<OwnModel>| {
            let _registered = Registered::new(own.clone());
            Arc::ptr_eq(&find(&settings).unwrap().unwrap(), &own)
        };
        let first = own("torch:same");
        let _registered = Registered::new(first.clone());
        thread::scope(|scope| {
            assert!(scope.spawn(|| found(own("torch:same"))).join().unwrap());
            let _other = scope.spawn(|| Registered::new(own("torch:same"))).join().unwrap();
            assert!(Arc::ptr_eq(&find(&settings).unwrap().unwrap(), &first));
            let error = scope.spawn(|| find(&settings).err().unwrap().to_string()).join().unwrap();
            assert!(error.contains("several commands"), "{error}");
        });
    }

    #[test]
    fn settings_of_other_models_are_refused() {
        let _registered = Registered::new(own("torch:c"));
        let spec = ModelSettings { context: Some(8), ..settings("torch:c", "torch:rows") };
        assert!(find(&spec).err().unwrap().to_string().contains("--context does not apply to `torch:c`"));
    }
}
