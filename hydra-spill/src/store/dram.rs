//! The tier of images in ordinary host memory.

use super::slots::{self, Content, Slots};
use super::{TierStore, check};
use crate::{Floats, ImageId, ImageView, ImageWriter, Masters, NarrowFloats, Reservation, SpillError};
use bytes::Bytes;
use std::sync::Arc;

/// Images in ordinary host memory.
#[derive(Debug, Default)]
pub struct DramStore {
    slots: Slots<Stored>,
}

/// Masters whose parameters every view that is out shares.
#[derive(Debug)]
struct Stored {
    params: Arc<Params>,
    moments: Vec<Vec<f32>>,
}

#[derive(Debug)]
struct Params {
    wide: Floats,
    narrow: Option<NarrowFloats>,
}

/// A view of the parameters, or of what moves of them. The lease is released last, for fields are dropped in this order.
struct View {
    params: Arc<Params>,
    of: fn(&Params) -> &[u8],
    _lease: Arc<()>,
}

impl AsRef<[u8]> for View {
    fn as_ref(&self) -> &[u8] {
        (self.of)(&self.params)
    }
}

impl From<Masters> for Stored {
    fn from(Masters { params: wide, narrow, moments }: Masters) -> Self {
        Self { params: Arc::new(Params { wide, narrow }), moments }
    }
}

impl From<Stored> for Masters {
    fn from(Stored { params, moments }: Stored) -> Self {
        let Params { wide: params, narrow } = Arc::into_inner(params).expect("nobody reads what was taken");
        Self { params, narrow, moments }
    }
}

impl DramStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    fn view(&self, id: ImageId, of: fn(&Params) -> &[u8]) -> Result<ImageView, SpillError> {
        slots::slot(&self.slots, id, |slot| {
            let (stored, lease) = slot.content.read(id)?;
            let view = View { params: stored.params.clone(), of, _lease: lease };
            Ok(ImageView { bytes: Bytes::from_owner(view), version: slot.version })
        })
    }
}

impl TierStore for DramStore {
    fn insert(&self, id: ImageId, masters: Masters, reservation: Reservation) -> Result<(), SpillError> {
        check(id, &masters, &reservation)?;
        slots::insert(&self.slots, id, masters.into(), vec![reservation])
    }

    fn read(&self, id: ImageId) -> Result<ImageView, SpillError> {
        self.view(id, |params| params.narrow.as_ref().map_or(params.wide.as_ref(), AsRef::as_ref))
    }

    fn read_masters(&self, id: ImageId) -> Result<ImageView, SpillError> {
        self.view(id, |params| params.wide.as_ref())
    }

    fn write(&self, id: ImageId) -> Result<ImageWriter, SpillError> {
        let (masters, home) = (slots::take(&self.slots, id)?.into(), self.slots.clone());
        let put_back = move |masters: Masters, committed| {
            slots::put_back(&home, id, Content::at_rest(masters.into()), committed);
        };
        Ok(ImageWriter::new(masters, put_back))
    }

    fn version(&self, id: ImageId) -> Result<u64, SpillError> {
        slots::slot(&self.slots, id, |slot| Ok(slot.version))
    }

    fn remove(&self, id: ImageId) -> Result<Masters, SpillError> {
        let stored = slots::take(&self.slots, id)?;
        slots::lock(&self.slots).remove(&id);
        Ok(stored.into())
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance;
    use super::*;

    #[test]
    fn the_dram_store_conforms() {
        conformance::run(&|| Arc::new(DramStore::new()));
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
    fn a_busy_image_says_who_holds_it() {
        let store = DramStore::new();
        let (id, budget) = (conformance::ID, conformance::budget());
        conformance::insert(&store, id, &budget);
        let view = (store.read(id).unwrap(), store.read(id).unwrap());
        assert_eq!(
            store.write(id).unwrap_err().to_string(),
            "image 5 of task 3 is busy: 2 readers hold it; drop their views first"
        );
        drop(view);
        let _writer = store.write(id).unwrap();
        assert_eq!(
            store.read(id).unwrap_err().to_string(),
            "image 5 of task 3 is busy: it is being written; commit or drop its writer first"
        );
    }
}
