//! A module of PyTorch as a layer.

use super::{Held, described, taken, taken_in_part, views};
use burn::module::ParamId;
use burn::tensor::{DType, Device, Gradients};
use hydra_core::{
    Activation, AnyTensor, CostKey, Declared, DeviceTensor, ForeignBackward, HostTensor, Init, Layer,
    Objective, OwnInit, ParamInfo, Pass, StateRule, foreign, last_layer,
};
use pyo3::prelude::*;
use std::any::TypeId;
use std::collections::HashMap;
use std::hint::black_box;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A parameter of a module.
#[derive(Clone)]
pub(super) struct Param {
    pub info: ParamInfo,
    pub trained: bool,
    /// How observations change it, if it is a state.
    pub state: Option<StateRule>,
}

/// What Python lists of a parameter: its name, shape, whether it is trained, the tensor's identifier and a state's factors.
type Listed = (String, Vec<usize>, bool, usize, Option<(f64, f64)>);

/// A module as a layer, on a device or not.
#[derive(Clone)]
pub(super) struct TorchLayer {
    module: Arc<Module>,
    /// Which of the parameters are fixed states; none if it is empty.
    fixed: Vec<bool>,
    promoted: Option<Promoted>,
}

struct Module {
    /// The `_Layer` of Python.
    python: Held,
    name: String,
    /// A hash of its classes and operations (`_trace.py`), if it is known.
    cost_key: Option<String>,
    params: Vec<Param>,
    measured: Mutex<HashMap<Shapes, TorchBytes>>,
}

/// What the memory of a call depends on: whether it trains, and the shapes of its inputs and targets.
type Shapes = (bool, Vec<Vec<usize>>);

/// The bytes of PyTorch in a call, beyond the tensors in Rust's memory.
#[derive(Clone, Copy, Default)]
struct TorchBytes {
    /// The peak of the forward.
    forward: usize,
    /// What the graph holds between the forward and the backward.
    held: usize,
    /// The peak of the backward, beyond what the graph holds.
    backward: Option<usize>,
}

/// Memory of PyTorch, charged to the device of the calling thread: the same number of bytes, which nothing touches.
struct Charge(Vec<u8>);

impl Charge {
    fn new(bytes: usize) -> Self {
        let mut reserved = Vec::new();
        // Without the address space, PyTorch would have failed as well.
        let _ = reserved.try_reserve_exact(bytes);
        Self(black_box(reserved))
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        drop(black_box(std::mem::take(&mut self.0)));
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TorchLayer {
    /// Returns the layer of a `_Layer` of Python. Parameters that are one tensor have one identifier in `ids`.
    pub(super) fn new(python: Bound<'_, PyAny>, ids: &mut HashMap<usize, ParamId>) -> PyResult<Self> {
        let name = python.getattr("name")?.extract()?;
        let listed: Vec<Listed> = python.call_method0("parameters")?.extract()?;
        let params = listed.into_iter().map(|(name, shape, trained, tensor, rule)| {
            let id = *ids.entry(tensor).or_default();
            let state = rule.map(|(keep, gain)| StateRule { keep, gain });
            Param { info: ParamInfo { name, shape, id }, trained, state }
        });
        let params = params.collect();
        let cost_key = python.getattr("cost_key")?.extract()?;
        let module = Module { python: Held::new(python), name, cost_key, params, measured: Mutex::default() };
        Ok(Self { module: Arc::new(module), fixed: Vec::new(), promoted: None })
    }

    pub(super) fn name(&self) -> &str {
        &self.module.name
    }

    /// Copies the initial values of a parameter.
    pub(super) fn read(&self, param: &str, out: &mut [f32]) -> PyResult<()> {
        Python::attach(|py| {
            let values = self.module.python.bind(py)?.call_method1("values", (param,))?;
            let values = values.extract::<PyRef<'_, super::Memory>>()?.tensor();
            values.read_floats(0..out.len(), out);
            Ok(())
        })
    }
}

impl Module {
    /// Panics with the exception of a call of Python: the panic fails the task.
    fn fail(&self, what: &str, error: &PyErr) -> ! {
        let error = Python::attach(|py| described(py, error));
        panic!("the {what} of the PyTorch module `{}` failed: {error}", self.name)
    }

    fn measured(&self, shapes: &Shapes) -> Option<TorchBytes> {
        locked(&self.measured).get(shapes).copied()
    }
}

/// The parameters of a module on a device.
#[derive(Clone)]
struct Promoted {
    params: Vec<HostTensor>,
    device: Device,
    tracked: Vec<bool>,
    gradients: Arc<Mutex<Vec<Option<HostTensor>>>>,
}

/// The outputs of a forward, and the graph that PyTorch holds for the backward.
struct Called {
    outputs: Vec<HostTensor>,
    graph: Option<Held>,
}

impl Module {
    fn call(
        &self,
        (params, fixed): (&[HostTensor], &[bool]),
        inputs: &[HostTensor],
        pass: &Pass,
    ) -> PyResult<(Called, Shapes)> {
        let targets: Vec<HostTensor> =
            pass.targets().parts().iter().cloned().map(AnyTensor::into_host).collect();
        let seed = pass.site(0).key().bits(0);
        let shapes = (pass.is_training(), inputs.iter().chain(&targets).map(|x| x.shape.clone()).collect());
        let known = self.measured(&shapes);
        let called = Python::attach(|py| {
            let (params, inputs, targets) = (views(params), views(inputs), views(&targets));
            let arguments =
                (params, inputs, targets, seed, pass.is_training(), fixed.to_vec(), known.is_none());
            let called = self.python.bind(py)?.call_method1("forward", arguments)?;
            let (outputs, graph, forward, held): (Bound<'_, PyAny>, Bound<'_, PyAny>, usize, usize) =
                called.extract()?;
            let graph = (!graph.is_none()).then(|| Held::new(graph));
            if known.is_none() {
                let found = TorchBytes { forward, held, backward: None };
                locked(&self.measured).insert(shapes.clone(), found);
            }
            Ok::<_, PyErr>(Called { outputs: taken(&outputs)?, graph })
        })?;
        Ok((called, shapes))
    }

    /// Returns the backward of a call, which keeps the gradients of the parameters in `gradients`.
    fn backward(
        self: Arc<Self>,
        graph: Held,
        shapes: Shapes,
        (held, wanted): (Charge, Vec<bool>),
        gradients: Arc<Mutex<Vec<Option<HostTensor>>>>,
    ) -> ForeignBackward {
        let module = self;
        Box::new(move |of_outputs| {
            let measured = module.measured(&shapes).unwrap_or_default();
            let backward = || {
                Python::attach(|py| {
                    let of_outputs: Vec<Option<super::Memory>> =
                        of_outputs.into_iter().map(|one| one.map(super::Memory::view)).collect();
                    let graph = graph.bind(py)?;
                    let found =
                        graph.call_method1("backward", (of_outputs, wanted, measured.backward.is_none()))?;
                    let (params, inputs, peak): (Bound<'_, PyAny>, Bound<'_, PyAny>, usize) =
                        found.extract()?;
                    Ok::<_, PyErr>((taken_in_part(&params)?, taken_in_part(&inputs)?, peak))
                })
            };
            let (params, inputs, peak) = backward().unwrap_or_else(|error| module.fail("backward", &error));
            let peak = measured.backward.unwrap_or(peak);
            if let Some(known) = locked(&module.measured).get_mut(&shapes) {
                known.backward = Some(peak);
            }
            drop(Charge::new(peak));
            drop((graph, held));
            *locked(&gradients) = params;
            inputs
        })
    }
}

impl Layer for TorchLayer {
    fn params(&self) -> Vec<ParamInfo> {
        self.module.params.iter().map(|param| param.info.clone()).collect()
    }

    fn declared(&self) -> Vec<Declared> {
        let declared = |param: &Param| Declared {
            info: param.info.clone(),
            given: None,
            trained: Some(param.trained),
            running: false,
            quantized: false,
            state: param.state,
        };
        self.module.params.iter().map(declared).collect()
    }

    fn uninitialized(self: Box<Self>, own: &[bool]) -> (Box<dyn Layer>, Vec<Option<OwnInit>>) {
        (self, vec![None; own.len()])
    }

    fn init(&self, _: &str, _: &[usize]) -> Init {
        // The chain's source has the module's values.
        Init::Zeros
    }

    fn working_bytes(&self, _: &[Vec<usize>]) -> Option<u64> {
        None
    }

    fn cost_key(&self) -> Option<CostKey> {
        let text = self.module.cost_key.clone()?;
        Some(CostKey { module: TypeId::of::<Self>(), text })
    }

    fn reads_targets(&self) -> bool {
        false
    }

    fn promote(&self, params: &[DeviceTensor], device: &Device, track: &[bool]) -> Box<dyn Layer> {
        let host = |param: &DeviceTensor| {
            let Some(bytes) = param.bytes.as_host().filter(|_| param.dtype == DType::F32) else {
                panic!(
                    "the PyTorch module `{}` computes on CPU devices in f32: pass devices=\"cpu:N\"",
                    self.module.name
                )
            };
            HostTensor::view(bytes.clone(), param.shape.clone(), param.dtype)
        };
        let params: Vec<HostTensor> = params.iter().map(host).collect();
        let gradients = Arc::new(Mutex::new(vec![None; params.len()]));
        let promoted = Promoted { params, device: device.clone(), tracked: track.to_vec(), gradients };
        Box::new(Self { promoted: Some(promoted), ..self.clone() })
    }

    fn with_fixed_states(self: Box<Self>, fixed: &[bool]) -> Box<dyn Layer> {
        Box::new(Self { fixed: fixed.to_vec(), ..*self })
    }

    fn with_objective(self: Box<Self>, objective: Arc<dyn Objective>) -> Box<dyn Layer> {
        last_layer(self, objective)
    }

    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let module = &self.module;
        let Some(Promoted { params, device, tracked, gradients }) = &self.promoted else {
            panic!("the PyTorch module `{}` is not on a device", module.name)
        };
        let inputs: Vec<HostTensor> = x.parts().iter().cloned().map(AnyTensor::into_host).collect();
        let called = module.call((params, &self.fixed), &inputs, pass);
        let (Called { outputs, graph }, shapes) =
            called.unwrap_or_else(|error| module.fail("forward", &error));
        let TorchBytes { forward, held, .. } = module.measured(&shapes).unwrap_or_default();
        drop(Charge::new(forward));
        let Some(graph) = graph else {
            return outputs.iter().map(|output| output.to_device(device)).collect();
        };
        // The first trained layer needs no gradient of its inputs.
        let wanted = x.parts().iter().map(AnyTensor::is_tracked).collect();
        let held = (Charge::new(held), wanted);
        let backward = Arc::clone(module).backward(graph, shapes, held, Arc::clone(gradients));
        foreign(&x, outputs, tracked.contains(&true), backward, device)
    }

    fn take_gradients(&self, _: &mut Gradients) -> Vec<Option<AnyTensor>> {
        let Some(Promoted { tracked, gradients, .. }) = &self.promoted else { return Vec::new() };
        let found = std::mem::take(&mut *locked(gradients));
        // The plain device: gradients are outside the graph.
        let device = Device::flex();
        let each = tracked.iter().zip(found.into_iter().chain(std::iter::repeat(None)));
        let taken = |(tracked, found): (&bool, Option<HostTensor>)| {
            let mut found = found.filter(|_| *tracked)?;
            if found.shape.is_empty() {
                // A scalar: Burn's tensors have a dimension.
                found.shape.push(1);
            }
            Some(found.to_device(&device))
        };
        each.map(taken).collect()
    }
}
