//! Giving the maps of a layer their adapters.

use super::Lora;
use crate::parts::Adapter;
use burn::module::Module;
use hydra_core::{ChainBuilder, Forward};

/// Sites of adapters' dropout begin here; a layer's own are below.
const FIRST_SITE: u64 = 16;

/// A map that can be adapted.
pub(crate) struct AdaptableMap<'a> {
    /// Its name within the layer: `self_attn.q_proj`.
    pub name: &'static str,
    /// The place of its adapter.
    pub adapter: &'a mut Option<Adapter>,
    /// The widths of what goes in and comes out.
    pub shape: [usize; 2],
}

/// A layer with maps that can be adapted.
pub(crate) trait Adaptable: Module {
    /// The maps, always in one order.
    fn maps(&mut self) -> Vec<AdaptableMap<'_>>;
}

/// The layer as it is, or frozen but for new adapters of the maps that are asked for.
pub(crate) fn adapted<M: Adaptable>(layer: M, lora: Option<&Lora>) -> M {
    let Some(lora) = lora else { return layer };
    let mut layer = layer.no_grad();
    let maps = layer.maps().into_iter().zip(FIRST_SITE..);
    for (AdaptableMap { adapter, shape, .. }, site) in maps.filter(|(map, _)| lora.targets(map.name)) {
        *adapter = Some(Adapter::new(shape, lora, site));
    }
    layer
}

/// Appends a layer without maps that can be adapted: it is trained where nothing is adapted, and frozen elsewhere.
pub(crate) fn kept(
    chain: ChainBuilder,
    name: &str,
    layer: impl Forward + Sync + 'static,
    lora: Option<&Lora>,
) -> ChainBuilder {
    match lora {
        Some(_) => chain.frozen(name, layer),
        None => chain.layer(name, layer),
    }
}

/// The most elements that a layer's adapters have at hand for each token.
pub(crate) fn adapter_elements<M: Adaptable>(layer: &M) -> usize {
    // A hollow layer's clone has no values to copy.
    let mut layer = layer.clone();
    layer.maps().into_iter().filter_map(|map| map.adapter.as_ref().map(Adapter::working_elements)).sum()
}
