//! The optimizer: an actor that accumulates gradients and steps master weights, and the arithmetic of both.
//!
//! May touch: the protocol, the writer's jobs, and the store that it receives.
//! Never: uses devices except to step on them, contains an optimizer's formula, or decides when a task is at rest.

mod actor;
mod arithmetic;
mod check;
#[cfg(feature = "cube")]
mod cube;
mod device_memory;
mod gradient;
mod host_memory;
mod on_device;

pub(crate) use actor::{Contribution, HostJob, HostOptimizer, MicroStep};
pub(crate) use arithmetic::{TaskStep, clip_factor, global_norm};
pub(crate) use check::Tried;
pub use check::{OptimizerCheck, RuleCheck};
pub(crate) use device_memory::{DeviceFloats, DeviceMemory};
pub(crate) use gradient::{BufferGradient, BufferSum, HostAdder, sum_of_squares};
pub(crate) use on_device::{DeviceStepper, memory_of};

#[cfg(test)]
mod tests {
    use hydra_core::{BufferParam, Encoding, FloatType, Init, Key, ParamBufferLayout};

    pub(super) fn numbers(key: u64, n: usize) -> Vec<f32> {
        (0..n as u64).map(|i| Key::new(key).normal(i) as f32).collect()
    }

    /// A buffer of parameters that two layers use.
    pub(super) fn tied(params: usize, len: usize, float: FloatType) -> ParamBufferLayout {
        let stride = len.next_multiple_of(128);
        let param = |index: usize| BufferParam {
            name: format!("p{index}"),
            shape: vec![len],
            offset: index * stride,
            len,
            init: Init::Zeros,
            given: None,
            state: None,
        };
        let (name, elements) = ("tied".to_owned(), params * stride);
        let params = (0..params).map(param).collect();
        let (layers, encoding) = (vec![0, 3], Encoding::Masters);
        ParamBufferLayout { name, params, elements, layers, trained: true, float, encoding }
    }
}
