//! The tier of buffers in ordinary host memory.

use super::slots::{self, SlotContent, Slots};
use super::{InPlaceParams, MastersPart, Moment, TierStore, ViewOf, check};
use crate::{Masters, ParamBufferId, ParamBufferView, ParamBufferWriter, Reservation, SpillError};
use bytes::Bytes;
use std::sync::Arc;

/// Buffers in ordinary host memory.
#[derive(Debug, Default)]
pub struct DramStore {
    /// Master weights that all views share.
    slots: Slots<Arc<Masters>>,
}

/// A view of a part of the master weights. The lease is released last, because fields are dropped in this
/// order.
struct WeightsView {
    masters: Arc<Masters>,
    of: ViewOf,
    _lease: Arc<()>,
}

impl AsRef<[u8]> for WeightsView {
    fn as_ref(&self) -> &[u8] {
        let Masters { params, narrow, moments, .. } = &*self.masters;
        let moving: &[u8] = narrow.as_ref().map_or(params.as_ref(), AsRef::as_ref);
        match &self.of {
            ViewOf::Promoted(None) => moving,
            ViewOf::Promoted(Some((elements, each))) => &moving[elements.start * each..elements.end * each],
            ViewOf::Masters(MastersPart::Params, None) => params.as_ref(),
            ViewOf::Masters(MastersPart::Params, Some(elements)) => {
                bytemuck::cast_slice(&params[elements.clone()])
            }
            ViewOf::Masters(MastersPart::Moment(moment), elements) => {
                let Moment { words, layout } = &moments[*moment];
                let bytes: &[u8] = bytemuck::cast_slice(words);
                elements.clone().map_or(bytes, |elements| &bytes[layout.bytes_of(elements)])
            }
        }
    }
}

/// Unwraps master weights that were taken out, which have no readers.
fn taken(masters: Arc<Masters>) -> Masters {
    Arc::into_inner(masters).expect("master weights that were taken have no readers")
}

impl DramStore {
    /// Returns an empty store.
    pub fn new() -> Self {
        Self::default()
    }
}

impl TierStore for DramStore {
    fn insert(
        &self,
        id: ParamBufferId,
        masters: Masters,
        reservation: Reservation,
    ) -> Result<(), SpillError> {
        check(id, &masters, &reservation)?;
        slots::insert(&self.slots, id, Arc::new(masters.with_zeros()), vec![reservation])
    }

    fn view(&self, id: ParamBufferId, of: ViewOf) -> Result<ParamBufferView, SpillError> {
        slots::slot(&self.slots, id, |slot| {
            let (masters, lease) = slot.content.read(id)?;
            if masters.files.is_some() {
                return Err(SpillError::InPlace { buffer: id });
            }
            let view = WeightsView { masters: masters.clone(), of, _lease: lease };
            Ok(ParamBufferView { bytes: Bytes::from_owner(view), version: slot.version })
        })
    }

    fn write(&self, id: ParamBufferId) -> Result<ParamBufferWriter, SpillError> {
        let (masters, home) = (taken(slots::take(&self.slots, id)?), self.slots.clone());
        let put_back = move |masters: Masters, committed| {
            slots::put_back(&home, id, SlotContent::at_rest(Arc::new(masters)), committed);
        };
        Ok(ParamBufferWriter::new(masters, put_back))
    }

    fn version(&self, id: ParamBufferId) -> Result<u64, SpillError> {
        slots::slot(&self.slots, id, |slot| Ok(slot.version))
    }

    fn in_place(&self, id: ParamBufferId) -> Result<Option<(Arc<InPlaceParams>, u64)>, SpillError> {
        slots::slot(&self.slots, id, |slot| {
            let (masters, _) = slot.content.read(id)?;
            Ok(masters.files.clone().map(|files| (files, slot.version)))
        })
    }

    fn remove(&self, id: ParamBufferId) -> Result<Masters, SpillError> {
        let stored = slots::take(&self.slots, id)?;
        slots::lock(&self.slots).remove(&id);
        Ok(taken(stored))
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance;
    use super::*;

    #[test]
    fn the_dram_store_conforms() {
        conformance::run(&|| Arc::new(DramStore::new()));
        conformance::run_quantized(&|| Arc::new(DramStore::new()));
    }

    #[test]
    fn reading_and_writing_move_no_parameters() {
        let store = DramStore::new();
        let (id, budget) = (conformance::ID, conformance::budget());
        conformance::insert(&store, id, &budget);
        let address = store.read(id).unwrap().bytes.as_ptr() as usize;
        let writer = store.write(id).unwrap();
        assert_eq!(writer.params.as_ptr() as usize, address);
        writer.commit();
        assert_eq!(store.read(id).unwrap().bytes.as_ptr() as usize, address);
        assert_eq!(store.remove(id).unwrap().params.as_ptr() as usize, address);
    }

    #[test]
    fn a_busy_buffer_says_who_holds_it() {
        let store = DramStore::new();
        let (id, budget) = (conformance::ID, conformance::budget());
        conformance::insert(&store, id, &budget);
        let view = (store.read(id).unwrap(), store.read(id).unwrap());
        assert_eq!(
            store.write(id).unwrap_err().to_string(),
            "parameter buffer 5 of task 3 is busy: 2 readers hold it; drop their views first"
        );
        drop(view);
        let _writer = store.write(id).unwrap();
        assert_eq!(
            store.read(id).unwrap_err().to_string(),
            "parameter buffer 5 of task 3 is busy: it is being written; commit or drop its writer first"
        );
    }
}
