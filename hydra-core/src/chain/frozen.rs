//! Selects the trained layers of a chain.

use super::{Chain, ChainLayer, ParamBufferLayout, ParamRef};
use crate::CoreError;

/// The maximum number of layers that an error lists.
const NAMED: usize = 12;

impl ChainLayer {
    /// The layer with its frozen states fixed.
    pub(super) fn fixing_frozen_states(self, buffers: &[ParamBufferLayout]) -> Self {
        let is_frozen_state = |param: &ParamRef| {
            let buffer = &buffers[param.buffer];
            !buffer.trained && buffer.params[param.slot].state.is_some()
        };
        let fixed: Vec<bool> = self.params.iter().map(is_frozen_state).collect();
        match fixed.contains(&true) {
            true => Self { layer: self.layer.with_fixed_states(&fixed), ..self },
            false => self,
        }
    }
}

impl Chain {
    /// Returns the chain with only these layers trained, by name: all others are frozen, as with
    /// [`ChainBuilder::frozen`](crate::ChainBuilder::frozen), and frozen layers stay frozen.
    ///
    /// A shared parameter is trained only if all layers that use it are trained. For example, if the head of
    /// a model is tied to the token embedding and only the head is selected, the head's other parameters are
    /// trained and no backward pass runs down to the embedding. Buffers keep their layout and therefore their
    /// initial values.
    ///
    /// # Errors
    /// [`CoreError::NoSuchLayer`] for a name that no layer has, and [`CoreError::NothingToTrain`] if these
    /// layers have no trained parameter.
    pub fn training_only(mut self, names: &[impl AsRef<str>]) -> Result<Self, CoreError> {
        for name in names.iter().map(AsRef::as_ref) {
            if !self.layers.iter().any(|layer| layer.name == name) {
                let (chain, layers) = (self.name.clone(), self.layer_names());
                return Err(CoreError::NoSuchLayer { chain, layer: name.to_owned(), layers });
            }
        }
        let is_named = |layer: &ChainLayer| names.iter().any(|name| name.as_ref() == layer.name);
        let named: Vec<bool> = self.layers.iter().map(is_named).collect();
        for buffer in &mut self.buffers {
            buffer.trained &= buffer.layers.iter().all(|layer| named[*layer]);
        }
        let frozen: Vec<bool> = (0..self.len()).map(|layer| !self.trains(layer)).collect();
        for (layer, frozen) in self.layers.iter_mut().zip(frozen) {
            layer.frozen |= frozen && !layer.params.is_empty();
        }
        self.encode();
        match self.buffers.iter().any(ParamBufferLayout::is_optimized) {
            true => Ok(self.fixing_frozen_states()),
            false => Err(CoreError::NothingToTrain { chain: self.name }),
        }
    }

    /// Returns the chain with every parameter frozen, for a model that is only evaluated: it has no backward pass, and its
    /// parameters are stored and planned as frozen ones.
    pub fn evaluated_only(mut self) -> Self {
        self.buffers.iter_mut().for_each(|buffer| buffer.trained = false);
        self.layers.iter_mut().for_each(|layer| layer.frozen |= !layer.params.is_empty());
        self.encode();
        self.fixing_frozen_states()
    }

    /// The chain with its frozen states fixed: training passes read them too.
    fn fixing_frozen_states(mut self) -> Self {
        let buffers = &self.buffers;
        self.layers = self.layers.into_iter().map(|layer| layer.fixing_frozen_states(buffers)).collect();
        self
    }

    /// Returns for each parameter of the layer at `layer`, in order, whether it is trained.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn trained_params(&self, layer: usize) -> impl Iterator<Item = bool> {
        self.layers[layer].params.iter().map(|param| self.buffers[param.buffer].trained)
    }

    /// The first layer with a trained parameter, where backward passes end. If all parameters are frozen, it is the number of
    /// layers: there is no backward pass.
    pub fn first_trained(&self) -> usize {
        let frozen = if self.buffers.is_empty() { 0 } else { self.len() };
        (0..self.len()).position(|layer| self.trains(layer)).unwrap_or(frozen)
    }

    fn trains(&self, layer: usize) -> bool {
        self.trained_params(layer).any(|trained| trained)
    }

    /// Lists the names of the layers; a long list is abbreviated to the first ones and the last.
    fn layer_names(&self) -> String {
        let mut names: Vec<String> = self.layers.iter().map(|layer| format!("`{}`", layer.name)).collect();
        if names.len() > NAMED {
            names.splice(NAMED - 2..names.len() - 1, ["..".to_owned()]);
        }
        names.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Activation, ChainBuilder, Forward, Pass};
    use burn::module::{Module, Param};
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::{Device, Tensor};

    /// A map with a table, which another layer may share.
    #[derive(Module, Debug)]
    struct Layer {
        linear: Linear,
        table: Param<Tensor<2>>,
    }

    impl Forward for Layer {
        fn forward(&self, x: Activation, _: &Pass) -> Activation {
            x
        }
    }

    #[derive(Module, Debug)]
    struct Loss {
        #[module(skip)]
        unused: usize,
    }

    impl Forward for Loss {
        fn forward(&self, x: Activation, _: &Pass) -> Activation {
            x
        }
    }

    fn table() -> Param<Tensor<2>> {
        Param::from_tensor(Tensor::ones([2, 2], &Device::flex()))
    }

    fn layer(table: Param<Tensor<2>>) -> Layer {
        Layer { linear: LinearConfig::new(2, 2).init(&Device::flex()), table }
    }

    /// Two layers that share a table, one with its own between them, and a loss.
    fn tied() -> Chain {
        let shared = table();
        let builder = Chain::builder("c").layer("in", layer(shared.clone())).layer("mid", layer(table()));
        builder.layer("out", layer(shared)).layer("loss", Loss { unused: 0 }).build().unwrap()
    }

    fn trained(chain: &Chain) -> Vec<&str> {
        let buffers = chain.buffers().iter().filter(|buffer| buffer.trained);
        buffers.map(|buffer| buffer.name.as_str()).collect()
    }

    #[test]
    fn a_chain_that_is_only_evaluated_has_no_backward_pass() {
        let chain = tied().evaluated_only();
        assert_eq!((trained(&chain), chain.first_trained()), (vec![], chain.len()));
        assert!(chain.layers().iter().all(|layer| layer.frozen || layer.params.is_empty()));
        let layout = |chain: &Chain| chain.buffers().iter().map(|buffer| buffer.elements).collect::<Vec<_>>();
        assert_eq!(layout(&chain), layout(&tied()));
    }

    #[test]
    fn nothing_is_trained_but_the_layers_that_are_named() {
        let all = tied();
        let last = tied().training_only(&["mid", "loss"]).unwrap();
        assert_eq!((trained(&last), last.first_trained()), (vec!["mid"], 1));
        let frozen: Vec<bool> = last.layers().iter().map(|layer| layer.frozen).collect();
        assert_eq!(frozen, [true, false, true, false], "the loss has no parameters to freeze");
        let names = |chain: &Chain| chain.buffers().iter().map(|i| i.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&last), names(&all));
        assert_ne!(last.architecture(), all.architecture());
        let again = last.training_only(&["in".to_owned(), "mid".to_owned()]).unwrap();
        assert_eq!(trained(&again), ["mid"], "frozen layers stay frozen");
    }

    #[test]
    fn a_parameter_of_several_layers_is_trained_if_all_of_them_are() {
        let (head, both) =
            (tied().training_only(&["out"]).unwrap(), tied().training_only(&["in", "out"]).unwrap());
        assert_eq!((trained(&head), head.first_trained()), (vec!["out"], 2));
        assert_eq!(head.trained_params(2).collect::<Vec<_>>(), [true, true, false]);
        assert_eq!(trained(&both), ["in", "in.table", "out"]);
        assert!(head.architecture().contains("in.table!@1"), "{}", head.architecture());
    }

    #[test]
    fn what_is_no_layer_or_trains_nothing_is_refused() {
        let error = tied().training_only(&["mid", "head"]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "chain `c` has no layer `head` to train; it has `in`, `mid`, `out`, `loss`"
        );
        let of = |builder: ChainBuilder, index: usize| builder.layer(format!("h.{index}"), layer(table()));
        let long = (0..20).fold(Chain::builder("long"), of).build().unwrap();
        let message = long.training_only(&["head"]).unwrap_err().to_string();
        assert!(message.ends_with("`h.8`, `h.9`, .., `h.19`"), "{message}");
        for names in [vec![], vec!["loss"]] {
            let error = tied().training_only(&names).unwrap_err();
            assert!(matches!(error, CoreError::NothingToTrain { .. }), "{error}");
        }
    }
}
