//! Moving images and activations between a store and the memory of one device.

use crate::store::covers;
use crate::{Budget, DeviceLink, Direction, ImageId, Reservation, SpillError, TierStore};
use hydra_core::{DeviceBytes, DeviceId, DeviceTensor, HostTensor, TaskId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Images of one task in a device's memory: copies that are read and dropped, never written back.
#[derive(Debug)]
#[must_use = "a resident copy is dropped with this"]
pub struct ResidentCopy {
    /// Each image's bytes in device memory and the version that they are a copy of.
    images: BTreeMap<usize, (DeviceBytes, u64)>,
    /// Released after the bytes are freed, for fields are dropped in this order.
    reservation: Reservation,
}

impl ResidentCopy {
    /// The bytes of an image. They are shared: a clone that outlives the resident copy keeps memory that is
    /// no longer reserved, and a tensor of them may see others there.
    ///
    /// # Panics
    /// If the image is not among [`images`](Self::images): a shard read what was not promoted for it.
    #[track_caller]
    pub fn image(&self, image: usize) -> DeviceBytes {
        match self.images.get(&image) {
            Some((bytes, _)) => bytes.clone(),
            None => panic!(
                "image {image} was read, but `{}` promoted only {:?}",
                self.reservation.owner(),
                self.images().collect::<Vec<_>>()
            ),
        }
    }

    /// Returns whether these bytes are a view of an image. Bytes that outlive the resident copy must not be: where the
    /// link shares, nobody could write the masters meanwhile, and where it copies, the memory is used again.
    pub fn holds(&self, bytes: &DeviceBytes) -> bool {
        self.images.values().any(|(image, _)| image.overlaps(bytes))
    }

    /// The bytes of all images.
    pub fn bytes(&self) -> u64 {
        self.images.values().map(|(bytes, _)| bytes.len() as u64).sum()
    }

    /// The version that an image is a copy of, if it is here.
    pub fn version(&self, image: usize) -> Option<u64> {
        self.images.get(&image).map(|(_, version)| *version)
    }

    /// The indices of the images, ascending.
    pub fn images(&self) -> impl Iterator<Item = usize> + '_ {
        self.images.keys().copied()
    }
}

/// Uploads what shard tasks read to one device, and downloads what they make there.
///
/// It decides nothing: who is promoted when, and against which reservation, is the orchestrator's to say.
pub struct SpillManager {
    device: DeviceId,
    budget: Budget,
    store: Arc<dyn TierStore>,
    link: Arc<dyn DeviceLink>,
}

impl SpillManager {
    /// A manager of `device`, whose memory `budget` counts and `link` reaches.
    pub fn new(
        device: DeviceId,
        budget: Budget,
        store: Arc<dyn TierStore>,
        link: Arc<dyn DeviceLink>,
    ) -> Self {
        Self { device, budget, store, link }
    }

    /// Copies images of a task from the store to the device, together with tensors of the host that a shard task reads
    /// beside them. The images' views are dropped when they are copied, so that the optimizer can write the masters while
    /// the device computes on the copy; where the link shares, the view is the resident copy, and the masters are busy
    /// until it is dropped. So they are where they live on the device ([`TierStore::on_device`]): then nothing is copied,
    /// and the reservation need not cover them, for the store's does. The tensors' bytes are the caller's to reserve, or
    /// part of the reservation.
    ///
    /// # Errors
    /// [`SpillError::ReservationElsewhere`] and [`SpillError::ReservationTooSmall`] if the reservation is not
    /// of this device's budget or does not cover the images, and what the store's read and the link return.
    /// The reservation is released then, and nothing is copied.
    pub fn promote(
        &self,
        task: TaskId,
        images: &[usize],
        inputs: &[HostTensor],
        reservation: Reservation,
    ) -> Result<(ResidentCopy, Vec<DeviceTensor>), SpillError> {
        self.owns(&reservation)?;
        let mut images: BTreeSet<usize> = images.iter().copied().collect();
        let (mut bytes, mut versions, mut needed) = (Vec::new(), Vec::new(), 0);
        let homed = self.on_device(task, &images)?;
        images.retain(|image| !homed.contains_key(image));
        for &image in &images {
            let view = self.store.read(ImageId::new(task, image))?;
            needed += view.bytes.len() as u64;
            covers(&reservation, needed)?;
            bytes.push(view.bytes);
            versions.push(view.version);
        }
        bytes.extend(inputs.iter().map(|input| input.bytes.clone()));
        let mut copies = self.link.upload_all(&bytes)?.into_iter();
        let copied = images.into_iter().zip(copies.by_ref().zip(versions));
        let images = copied.chain(homed).collect();
        let inputs = inputs.iter().zip(copies).map(|(input, copy)| uploaded(input, copy)).collect();
        Ok((ResidentCopy { images, reservation }, inputs))
    }

    /// Those of the images that live on the device.
    fn on_device(
        &self,
        task: TaskId,
        images: &BTreeSet<usize>,
    ) -> Result<BTreeMap<usize, (DeviceBytes, u64)>, SpillError> {
        let homed = |&image: &usize| {
            let copy = self.store.on_device(ImageId::new(task, image)).transpose()?;
            Some(copy.map(|copy| (image, copy)))
        };
        images.iter().filter_map(homed).collect()
    }

    fn owns(&self, reservation: &Reservation) -> Result<(), SpillError> {
        match reservation.budget().is(&self.budget) {
            true => Ok(()),
            false => Err(SpillError::ReservationElsewhere {
                expected: self.budget.name().to_owned(),
                found: reservation.budget().name().to_owned(),
                owner: reservation.owner().to_owned(),
            }),
        }
    }

    /// Copies tensors from the host to the device. The bytes are the caller's to reserve. Errors are those of the link.
    pub fn upload(&self, tensors: &[HostTensor]) -> Result<Vec<DeviceTensor>, SpillError> {
        let bytes: Vec<_> = tensors.iter().map(|tensor| tensor.bytes.clone()).collect();
        let copies = self.link.upload_all(&bytes)?;
        Ok(tensors.iter().zip(copies).map(|(tensor, copy)| uploaded(tensor, copy)).collect())
    }

    /// Copies tensors from the device to the host, those of them that there are, and drops them there.
    /// Errors are those of the link.
    pub fn download(
        &self,
        tensors: Vec<Option<DeviceTensor>>,
    ) -> Result<Vec<Option<HostTensor>>, SpillError> {
        let bytes: Vec<DeviceBytes> = tensors.iter().flatten().map(|tensor| tensor.bytes.clone()).collect();
        let mut copies = self.link.download_all(&bytes)?.into_iter();
        let mut taken = |tensor: DeviceTensor| {
            copies.next().map(|copy| HostTensor::view(copy, tensor.shape, tensor.dtype))
        };
        Ok(tensors.into_iter().map(|tensor| tensor.and_then(&mut taken)).collect())
    }

    /// All bytes that were copied to the device, images and activations.
    pub fn uploaded_bytes(&self) -> u64 {
        self.link.moved(Direction::Upload)
    }

    /// All bytes that were copied from the device, activations and gradients.
    pub fn downloaded_bytes(&self) -> u64 {
        self.link.moved(Direction::Download)
    }

    /// The budget of the device's memory.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// The link to the device.
    pub fn link(&self) -> &Arc<dyn DeviceLink> {
        &self.link
    }

    /// The device.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// The store that images are promoted from.
    pub fn store(&self) -> &Arc<dyn TierStore> {
        &self.store
    }
}

/// `tensor` with its bytes on the device.
fn uploaded(tensor: &HostTensor, bytes: DeviceBytes) -> DeviceTensor {
    DeviceTensor::view(bytes, tensor.shape.clone(), tensor.dtype)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::conformance::FailingLink;
    use crate::{DramStore, HostCopyLink, LinkError, Masters};
    use bytes::Bytes;
    use hydra_core::ByteSize;
    use std::sync::atomic::Ordering::Relaxed;

    const TASK: TaskId = TaskId(1);
    const DEVICE: DeviceId = DeviceId(2);

    /// A store with images 0..3 of 100, 200 and 300 parameters with the values 0, 1 and 2, and a device of
    /// 2000 bytes.
    fn manager(link: impl DeviceLink + 'static) -> SpillManager {
        let host = Budget::new("host memory", ByteSize::mib(1));
        let store = DramStore::new();
        for image in 0..3 {
            let masters = Masters::new(vec![image as f32; 100 * (image + 1)], Vec::new());
            let reservation = host.reserve(masters.len_bytes(), "masters").unwrap();
            store.insert(ImageId::new(TASK, image), masters, reservation).unwrap();
        }
        SpillManager::new(DEVICE, Budget::new("cpu:2", ByteSize(2000)), Arc::new(store), Arc::new(link))
    }

    fn floats(bytes: &DeviceBytes) -> &[f32] {
        bytemuck::cast_slice(bytes.as_host().unwrap())
    }

    fn promote(
        manager: &SpillManager,
        images: &[usize],
        bytes: u64,
        task: TaskId,
    ) -> Result<ResidentCopy, SpillError> {
        let reservation = manager.budget().reserve(bytes, "shard 4")?;
        manager.promote(task, images, &[], reservation).map(|(resident, _)| resident)
    }

    #[test]
    fn promoted_images_are_copies_that_leave_the_masters_free() {
        let manager = manager(HostCopyLink::new(DEVICE));
        let resident = promote(&manager, &[2, 0, 2], 1600, TASK).unwrap();
        assert_eq!(resident.images().collect::<Vec<_>>(), [0, 2]);
        assert_eq!((resident.bytes(), manager.uploaded_bytes()), (1600, 1600));
        assert_eq!((resident.version(2), resident.version(1)), (Some(0), None));

        let mut writer = manager.store().write(ImageId::new(TASK, 2)).unwrap();
        writer.params.fill(-1.0);
        writer.commit();
        assert_eq!(floats(&resident.image(2)), [2.0; 300]);
        let again = promote(&manager, &[2], 400, TASK);
        assert!(matches!(again, Err(SpillError::ReservationTooSmall { needed: 1200, reserved: 400, .. })));

        drop(resident);
        assert_eq!((manager.budget().used(), manager.downloaded_bytes()), (0, 0));
        let again = promote(&manager, &[2], 1200, TASK).unwrap();
        assert_eq!(again.version(2), Some(1));
        assert_eq!(floats(&again.image(2)), [-1.0; 300]);
    }

    #[test]
    fn a_shared_image_is_busy_until_it_is_demoted() {
        let manager = manager(crate::ZeroCopyLink::new(DEVICE));
        let id = ImageId::new(TASK, 1);
        let master = manager.store().read(id).unwrap().bytes;
        let resident = promote(&manager, &[0, 1], 1200, TASK).unwrap();
        let image = resident.image(1);
        assert_eq!((image.as_host().unwrap().as_ptr(), manager.uploaded_bytes()), (master.as_ptr(), 0));
        drop(image);
        let part = DeviceBytes::from(master.slice(4..8));
        assert!(resident.holds(&part) && !resident.holds(&Bytes::from(vec![0; 8]).into()));
        drop(part);
        assert_eq!(manager.budget().used(), 1200, "what is read is reserved, shared or not");
        drop(master);
        let busy = manager.store().write(id).map(drop).unwrap_err();
        assert!(matches!(busy, SpillError::ImageBusy { readers: 1, .. }), "{busy}");
        drop(resident);
        assert!(manager.store().write(id).is_ok());
    }

    #[test]
    fn a_refused_promotion_holds_nothing() {
        let manager = manager(HostCopyLink::new(DEVICE));
        let small = promote(&manager, &[0, 1, 2], 1599, TASK).unwrap_err();
        assert_eq!(
            small.to_string(),
            "the reservation of `shard 4` is 1.56 KiB, at least 2.35 KiB are needed: reserve what the images take"
        );
        assert_eq!(manager.uploaded_bytes(), 0, "what does not fit is not begun");
        let missing = promote(&manager, &[0], 400, TaskId(0)).unwrap_err();
        assert!(matches!(missing, SpillError::ImageMissing { image } if image == ImageId::new(TaskId(0), 0)));
        let elsewhere = Budget::new("cpu:2", ByteSize(2000)).reserve(400, "shard 4").unwrap();
        let elsewhere = manager.promote(TASK, &[0], &[], elsewhere);
        assert!(matches!(elsewhere, Err(SpillError::ReservationElsewhere { .. })));
        let writer = manager.store().write(ImageId::new(TASK, 0)).unwrap();
        let busy = promote(&manager, &[0], 400, TASK).unwrap_err();
        assert!(matches!(busy, SpillError::ImageBusy { readers: 0, .. }));
        drop(writer);
        assert_eq!(manager.budget().used(), 0);
        for image in 0..3 {
            assert!(manager.store().write(ImageId::new(TASK, image)).is_ok(), "no view is left of {image}");
        }
    }

    #[test]
    #[should_panic(expected = "image 1 was read, but `shard 4` promoted only [0, 2]")]
    fn an_image_that_was_not_promoted_is_named() {
        let manager = manager(HostCopyLink::new(DEVICE));
        let _ = promote(&manager, &[0, 2], 1600, TASK).unwrap().image(1);
    }

    #[test]
    fn tensors_travel_in_and_out_unchanged() {
        let manager = manager(HostCopyLink::new(DEVICE));
        let tensors =
            [HostTensor::float(vec![1.0, -0.0, f32::MAX, 4.0], [2, 2]), HostTensor::int(vec![1, 2, 3], [3])];
        let uploaded = manager.upload(&tensors).unwrap();
        let reservation = manager.budget().reserve(428, "shard 4").unwrap();
        let (resident, with) = manager.promote(TASK, &[0], &tensors, reservation).unwrap();
        assert_eq!((resident.bytes(), manager.uploaded_bytes()), (400, 2 * 28 + 400));
        for uploaded in [uploaded, with] {
            for (host, device) in tensors.iter().zip(&uploaded) {
                let bytes = device.bytes.as_host().unwrap();
                assert_ne!(host.bytes.as_ptr(), bytes.as_ptr(), "device memory is not the host's");
            }
            // One that is not there leaves its gap.
            let gapped = [Some(uploaded[0].clone()), None, Some(uploaded[1].clone())];
            let [first, second] = tensors.clone().map(Some);
            assert_eq!(manager.download(gapped.into()).unwrap(), [first, None, second]);
        }
        assert_eq!(manager.downloaded_bytes(), 56);
    }

    #[test]
    fn a_link_that_fails_leaves_nothing_reserved() {
        let (link, fails) = FailingLink::new(DEVICE);
        let manager = manager(link);
        drop(promote(&manager, &[1, 0], 1200, TASK).unwrap());
        fails.store(true, Relaxed);
        let failed = promote(&manager, &[0], 400, TASK).map(drop).unwrap_err();
        assert!(matches!(failed, SpillError::Link(LinkError::Transfer { bytes: 400, .. })), "{failed}");
        assert_eq!(manager.budget().used(), 0);
        assert!(manager.store().write(ImageId::new(TASK, 2)).is_ok());
    }
}
