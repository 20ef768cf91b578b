//! The targets of language models.

use crate::ops;
use burn::tensor::{Int, Tensor};

/// The targets of tokens `[batch, tokens]`, one for each of them in their order: the next token, and nothing at the end
/// of a sequence.
pub(crate) fn next_tokens(ids: Tensor<2, Int>) -> Tensor<1, Int> {
    let [batch, tokens] = ids.dims();
    let next = ids.clone().narrow(1, 1, tokens - 1);
    let none = ids.narrow(1, 0, 1).full_like(ops::IGNORED);
    Tensor::cat(vec![next, none], 1).reshape([batch * tokens])
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;
    use hydra_core::{AnyTensor, HostTensor};

    #[test]
    fn a_token_predicts_the_next_and_the_last_nothing() {
        let ids = HostTensor::int(vec![1, 2, 3, 4, 5, 6], [2, 3]).to_device(&Device::flex().autodiff());
        let targets = AnyTensor::from(next_tokens(ids.into_int())).into_host();
        assert_eq!(targets.as_i32(), [2, 3, -1, 5, 6, -1]);
    }
}
