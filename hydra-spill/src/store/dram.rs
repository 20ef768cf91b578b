//! The tier of images in ordinary host memory.

use super::{TierStore, check};
use crate::{Floats, ImageId, ImageView, ImageWriter, Masters, NarrowFloats, Reservation, SpillError};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Images in ordinary host memory.
#[derive(Debug, Default)]
pub struct DramStore {
    slots: Arc<Mutex<BTreeMap<ImageId, Slot>>>,
}

#[derive(Debug)]
struct Slot {
    content: Content,
    version: u64,
    /// Released after the content is freed, for fields are dropped in this order.
    _reservation: Reservation,
}

#[derive(Debug)]
enum Content {
    /// Every view that is out shares `params`.
    AtRest { params: Arc<Params>, moments: Vec<Vec<f32>> },
    /// A writer has the masters.
    Out,
}

#[derive(Debug)]
struct Params {
    wide: Floats,
    narrow: Option<NarrowFloats>,
}

struct Wide(Arc<Params>);

impl AsRef<[u8]> for Wide {
    fn as_ref(&self) -> &[u8] {
        self.0.wide.as_ref()
    }
}

/// The bytes that move.
struct Moving(Arc<Params>);

impl AsRef<[u8]> for Moving {
    fn as_ref(&self) -> &[u8] {
        match &self.0.narrow {
            Some(narrow) => narrow.as_ref(),
            None => self.0.wide.as_ref(),
        }
    }
}

impl Content {
    fn new(masters: Masters) -> Self {
        let Masters { params: wide, narrow, moments } = masters;
        Self::AtRest { params: Arc::new(Params { wide, narrow }), moments }
    }

    /// The masters, if nobody reads them; otherwise the number of readers.
    fn take(&mut self) -> Result<Masters, usize> {
        match std::mem::replace(self, Self::Out) {
            Self::Out => Err(0),
            Self::AtRest { params, moments } => match Arc::try_unwrap(params) {
                Ok(Params { wide, narrow }) => Ok(Masters { params: wide, narrow, moments }),
                Err(params) => {
                    // The last reader may have left since, but it was there when it mattered.
                    let readers = (Arc::strong_count(&params) - 1).max(1);
                    *self = Self::AtRest { params, moments };
                    Err(readers)
                }
            },
        }
    }
}

impl DramStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<ImageId, Slot>> {
        lock(&self.slots)
    }

    fn view(&self, id: ImageId, of: fn(Arc<Params>) -> bytes::Bytes) -> Result<ImageView, SpillError> {
        let slots = self.slots();
        let slot = slots.get(&id).ok_or(SpillError::ImageMissing { image: id })?;
        match &slot.content {
            Content::AtRest { params, .. } => {
                Ok(ImageView { bytes: of(params.clone()), version: slot.version })
            }
            Content::Out => Err(SpillError::ImageBusy { image: id, readers: 0 }),
        }
    }
}

fn lock(slots: &Mutex<BTreeMap<ImageId, Slot>>) -> MutexGuard<'_, BTreeMap<ImageId, Slot>> {
    // Nothing panics halfway through a change of a slot, so a poisoned map is as good as any.
    slots.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TierStore for DramStore {
    fn insert(&self, id: ImageId, masters: Masters, reservation: Reservation) -> Result<(), SpillError> {
        check(id, &masters, &reservation)?;
        let mut slots = self.slots();
        if slots.contains_key(&id) {
            return Err(SpillError::ImageExists { image: id });
        }
        slots.insert(id, Slot { content: Content::new(masters), version: 0, _reservation: reservation });
        Ok(())
    }

    fn read(&self, id: ImageId) -> Result<ImageView, SpillError> {
        self.view(id, |params| bytes::Bytes::from_owner(Moving(params)))
    }

    fn read_masters(&self, id: ImageId) -> Result<ImageView, SpillError> {
        self.view(id, |params| bytes::Bytes::from_owner(Wide(params)))
    }

    fn write(&self, id: ImageId) -> Result<ImageWriter, SpillError> {
        let mut slots = self.slots();
        let slot = slots.get_mut(&id).ok_or(SpillError::ImageMissing { image: id })?;
        let masters = slot.content.take().map_err(|readers| SpillError::ImageBusy { image: id, readers })?;
        let home = self.slots.clone();
        Ok(ImageWriter::new(masters, move |masters, committed| {
            // The slot is still there: an image that is being written cannot be removed.
            if let Some(slot) = lock(&home).get_mut(&id) {
                slot.content = Content::new(masters);
                slot.version += u64::from(committed);
            }
        }))
    }

    fn version(&self, id: ImageId) -> Result<u64, SpillError> {
        self.slots().get(&id).map(|slot| slot.version).ok_or(SpillError::ImageMissing { image: id })
    }

    fn remove(&self, id: ImageId) -> Result<Masters, SpillError> {
        let mut slots = self.slots();
        let slot = slots.get_mut(&id).ok_or(SpillError::ImageMissing { image: id })?;
        let masters = slot.content.take().map_err(|readers| SpillError::ImageBusy { image: id, readers })?;
        slots.remove(&id);
        Ok(masters)
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance;
    use super::*;

    #[test]
    fn the_dram_store_conforms() {
        conformance::run(&|| Box::new(DramStore::new()));
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
