//! Giving the maps of a layer their adapters.

use super::Lora;
use crate::ModelError;
use crate::parts::Adapter;
use burn::module::Module;
use hydra_core::{Chain, ChainBuilder, Forward};

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
fn adapted<M: Adaptable>(layer: M, lora: Option<&Lora>) -> Result<M, ModelError> {
    let Some(lora) = lora else { return Ok(layer) };
    let mut layer = layer.no_grad();
    let maps = layer.maps();
    lora.validate(&maps.iter().map(|map| map.name).collect::<Vec<_>>())?;
    for (AdaptableMap { adapter, shape, .. }, site) in
        maps.into_iter().zip(FIRST_SITE..).filter(|(map, _)| lora.targets(map.name))
    {
        *adapter = Some(Adapter::new(shape, lora, site));
    }
    Ok(layer)
}

/// The layers of a language model, as [`transformer`] has them.
///
/// # Errors
/// What [`Lora::validate`] refuses.
pub(crate) fn language_model<B: Adaptable + Forward + Sync + 'static>(
    names: (String, String),
    embed: impl IntoIterator<Item = (String, impl Forward + Sync + 'static)>,
    blocks: impl IntoIterator<Item = (String, B)>,
    head: impl IntoIterator<Item = (String, impl Forward + Sync + 'static)>,
    lora: Option<&Lora>,
) -> Result<ChainBuilder, ModelError> {
    Ok(transformer(names, embed, blocks, head, lora)?.language_model())
}

/// The layers of a model by their names: the embedding's, the blocks and the head's; trained, or frozen with adapters of the
/// blocks' maps. `note` says what is computed without adapters.
///
/// # Errors
/// What [`Lora::validate`] refuses.
pub(crate) fn transformer<B: Adaptable + Forward + Sync + 'static>(
    (name, note): (String, String),
    embed: impl IntoIterator<Item = (String, impl Forward + Sync + 'static)>,
    blocks: impl IntoIterator<Item = (String, B)>,
    head: impl IntoIterator<Item = (String, impl Forward + Sync + 'static)>,
    lora: Option<&Lora>,
) -> Result<ChainBuilder, ModelError> {
    let note = lora.map_or_else(|| note.clone(), |lora| format!("{note}, {}", lora.note()));
    let mut chain = unadapted(Chain::builder(name).note(note), embed, lora);
    for (name, block) in blocks {
        chain = chain.layer(name, adapted(block, lora)?);
    }
    Ok(unadapted(chain, head, lora))
}

/// Appends layers that have no adapters: frozen, where others have some.
fn unadapted(
    chain: ChainBuilder,
    layers: impl IntoIterator<Item = (String, impl Forward + Sync + 'static)>,
    lora: Option<&Lora>,
) -> ChainBuilder {
    layers.into_iter().fold(chain, |chain, (name, layer)| match lora {
        Some(_) => chain.frozen(name, layer),
        None => chain.layer(name, layer),
    })
}

/// The most elements that a layer's adapters have at hand for each token.
pub(crate) fn adapter_elements<M: Adaptable>(layer: &M) -> usize {
    // A hollow layer's clone has no values to copy.
    let mut layer = layer.clone();
    layer.maps().into_iter().filter_map(|map| map.adapter.as_ref().map(Adapter::working_elements)).sum()
}
