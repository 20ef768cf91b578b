//! The tier of buffers in ordinary host memory.

use super::slots::{self, Content, Slots};
use super::{InPlaceParams, MastersPart, TierStore, check};
use crate::{Masters, ParamBufferId, ParamBufferView, ParamBufferWriter, Reservation, SpillError};
use bytes::Bytes;
use std::ops::Range;
use std::sync::Arc;

/// Buffers in ordinary host memory.
#[derive(Debug, Default)]
pub struct DramStore {
    /// Master weights that all views share.
    slots: Slots<Arc<Masters>>,
}

/// A view of a part of the master weights. The lease is released last, because fields are dropped in this
/// order.
struct View<F> {
    masters: Arc<Masters>,
    of: F,
    _lease: Arc<()>,
}

impl<F: Fn(&Masters) -> &[u8]> AsRef<[u8]> for View<F> {
    fn as_ref(&self) -> &[u8] {
        (self.of)(&self.masters)
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

    fn view(
        &self,
        id: ParamBufferId,
        of: impl Fn(&Masters) -> &[u8] + Send + 'static,
    ) -> Result<ParamBufferView, SpillError> {
        slots::slot(&self.slots, id, |slot| {
            let (masters, lease) = slot.content.read(id)?;
            if masters.files.is_some() {
                return Err(SpillError::InPlace { buffer: id });
            }
            let view = View { masters: masters.clone(), of, _lease: lease };
            Ok(ParamBufferView { bytes: Bytes::from_owner(view), version: slot.version })
        })
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

    fn read(&self, id: ParamBufferId) -> Result<ParamBufferView, SpillError> {
        self.view(id, |masters| masters.narrow.as_ref().map_or(masters.params.as_ref(), AsRef::as_ref))
    }

    fn read_masters(&self, id: ParamBufferId) -> Result<ParamBufferView, SpillError> {
        self.view(id, |masters| masters.params.as_ref())
    }

    fn read_part(
        &self,
        id: ParamBufferId,
        part: MastersPart,
        elements: Range<usize>,
    ) -> Result<ParamBufferView, SpillError> {
        self.view(id, move |masters| match part {
            MastersPart::Params => bytemuck::cast_slice(&masters.params[elements.clone()]),
            MastersPart::Moment(moment) => {
                let moment = &masters.moments[moment];
                &bytemuck::cast_slice(&moment.words)[moment.layout.bytes_of(elements.clone())]
            }
        })
    }

    fn write(&self, id: ParamBufferId) -> Result<ParamBufferWriter, SpillError> {
        let (masters, home) = (taken(slots::take(&self.slots, id)?), self.slots.clone());
        let put_back = move |masters: Masters, committed| {
            slots::put_back(&home, id, Content::at_rest(Arc::new(masters)), committed);
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
