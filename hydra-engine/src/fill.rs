//! What a run begins with: the first masters of every task, drawn or read, or those of its checkpoint.

use crate::checkpoint::ImageValues;
use crate::error::{EngineError, guarded};
use crate::host::HostJob;
use crate::model::Model;
use crate::placement;
use crate::run::Run;
use crate::weights::initial_image;
use hydra_core::FloatType;
use hydra_spill::{ImageId, Masters, NarrowFloats};
use rayon::prelude::*;

impl Run {
    /// Puts every task's first masters into the store. A task whose weights cannot be read fails.
    pub(crate) fn fill_store(&mut self) {
        for index in
            (0..self.models.len()).filter(|index| self.models[*index].ended.is_none()).collect::<Vec<_>>()
        {
            if let Err(error) = self.fill_task(index) {
                self.fail(index, &error);
            }
        }
    }

    fn fill_task(&mut self, index: usize) -> Result<(), EngineError> {
        let images = guarded("reading the first weights", || first_values(&self.models[index]))?;
        let mut best = Vec::new();
        for (image, values) in images.into_iter().enumerate() {
            best.push(values.best);
            self.insert(index, image, (values.params, values.moments))?;
        }
        let kept = best.iter().any(Option::is_some);
        let best = kept.then(|| best.into_iter().map(Option::unwrap_or_default).collect());
        let model = &self.models[index];
        let job = HostJob::Register {
            task: model.id,
            chain: model.chain().clone(),
            spec: model.task.spec.clone(),
            steps: model.cursor.program().steps,
            best,
        };
        let _ = self.threads.host.send(job);
        self.keep_waiting(index)
    }

    /// Keeps room for the gradients of a task that lives on the device.
    fn keep_waiting(&mut self, index: usize) -> Result<(), EngineError> {
        let model = &mut self.models[index];
        if model.placement.on_device() {
            let bytes = placement::waiting(&model.task.chain, &model.task.spec);
            let budget = self.threads.devices[0].device.manager.budget();
            let room = budget.reserve(bytes, &model.task.name).map_err(hydra_spill::SpillError::from)?;
            model.waiting = Some(room);
        }
        Ok(())
    }

    fn insert(
        &self,
        index: usize,
        image: usize,
        (params, moments): (Vec<f32>, Vec<Vec<f32>>),
    ) -> Result<(), EngineError> {
        let model = &self.models[index];
        let layout = &model.chain().images()[image];
        // The copy of the best masters, where one is kept, is paid for with the masters.
        let best = layout.trained && model.task.spec.eval_every.is_some();
        let copies = moments.len() as u64 + u64::from(best);
        let bytes = layout.master_bytes() + copies * layout.moment_bytes();
        let reservation =
            self.host_budget.reserve(bytes, &model.task.name).map_err(hydra_spill::SpillError::from)?;
        let home = |values: Vec<f32>| match model.placement.on_device() {
            // They leave the host.
            true => values.into(),
            false => self.threads.devices[0].device.manager.link().home(values),
        };
        let masters = match layout.float {
            FloatType::F32 => Masters::new(home(params), moments),
            // The masters themselves do not move.
            float => {
                let narrow = Some(NarrowFloats::of(&params, float, home));
                Masters { narrow, ..Masters::new(params, moments) }
            }
        };
        self.store.insert(ImageId { task: model.id, image }, masters, reservation)?;
        Ok(())
    }
}

fn first_values(model: &Model) -> Result<Vec<ImageValues>, EngineError> {
    if let Some(checkpoint) = &model.task.resume {
        return Ok(checkpoint.reader()?.images(model.chain())?);
    }
    let moments = model.task.spec.optimizer.moments();
    let initial = |image: usize| {
        let params = initial_image(model.chain(), image, model.task.spec.seed)?;
        let moments = if model.chain().images()[image].trained { moments } else { 0 };
        Ok(ImageValues { moments: vec![vec![0.0; params.len()]; moments], params, best: None })
    };
    (0..model.chain().images().len()).into_par_iter().map(initial).collect()
}
