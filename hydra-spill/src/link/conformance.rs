//! The conformance suite of links.

use super::{DeviceLink, Direction, HostCopyLink, LinkError};
use crate::memory::aligned::{ALIGN, AlignedBytes, ELEMENT_ALIGN, allocate};
use bytes::Bytes;
use hydra_core::{DeviceBytes, DeviceId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A link that fails on demand.
pub(crate) struct FailingLink {
    copies: HostCopyLink,
    fails: Arc<AtomicBool>,
}

impl FailingLink {
    /// Returns a link of `device`, and the switch that makes it fail.
    pub(crate) fn new(device: DeviceId) -> (Self, Arc<AtomicBool>) {
        let fails = Arc::new(AtomicBool::new(false));
        (Self { copies: HostCopyLink::new(device), fails: fails.clone() }, fails)
    }

    fn attempt(&self, direction: Direction, bytes: usize) -> Result<(), LinkError> {
        match self.fails.load(Relaxed) {
            false => Ok(()),
            true => Err(LinkError::Transfer {
                link: "failing".to_owned(),
                direction,
                bytes: bytes as u64,
                source: "the device fell off the bus".into(),
            }),
        }
    }
}

impl DeviceLink for FailingLink {
    fn name(&self) -> &str {
        "failing"
    }

    fn upload(&self, host: &Bytes) -> Result<DeviceBytes, LinkError> {
        self.attempt(Direction::Upload, host.len())?;
        self.copies.upload(host)
    }

    fn download(&self, device: &DeviceBytes) -> Result<Bytes, LinkError> {
        self.attempt(Direction::Download, device.len())?;
        self.copies.download(device)
    }

    fn download_into(&self, device: &DeviceBytes, out: &mut [f32]) -> Result<(), LinkError> {
        self.attempt(Direction::Download, device.len())?;
        self.copies.download_into(device, out)
    }

    fn moved(&self, direction: Direction) -> u64 {
        self.copies.moved(direction)
    }
}

pub(crate) fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + seed * 17 + (i >> 8)) as u8).collect()
}

pub(crate) fn floats(values: &[f32]) -> Bytes {
    Bytes::copy_from_slice(bytemuck::cast_slice(values))
}

/// Checks the guarantees of every link.
pub(crate) fn conforms(link: &dyn DeviceLink) {
    assert!(!link.name().is_empty());
    contents_arrive_aligned_and_counted(link);
    match link.zero_copy() {
        false => copies_are_independent_of_the_host(link),
        true => views_keep_the_host_from_writing(link),
    }
    floats_are_copied(link);
    several_buffers_arrive_together(link);
    wrong_lengths_are_refused(link);
    copies_may_be_made_at_the_same_time(link);
}

fn contents_arrive_aligned_and_counted(link: &dyn DeviceLink) {
    for len in [0, 1, 63, 64, 65, 4096, 100_003] {
        let (up, down) = (link.moved(Direction::Upload), link.moved(Direction::Download));
        // An unaligned slice of a larger buffer.
        let host = Bytes::from(pattern(len, len + 3)).slice(3..);
        let device = link.upload(&host).unwrap();
        let back = link.download(&device).unwrap();
        assert_eq!((device.len(), &back), (host.len(), &host));
        let align = if link.zero_copy() { ELEMENT_ALIGN } else { ALIGN };
        assert!(
            [Some(&back), device.as_host()].into_iter().flatten().all(|b| b.as_ptr().addr() % align == 0)
        );
        if link.zero_copy() {
            // It was unaligned, so it was copied and then shared.
            assert_eq!(
                (link.moved(Direction::Upload) - up, link.moved(Direction::Download) - down),
                (len as u64, 0)
            );
            continue;
        }
        assert_eq!(link.moved(Direction::Upload) - up, len as u64);
        assert_eq!(link.moved(Direction::Download) - down, len as u64);
    }
}

fn copies_are_independent_of_the_host(link: &dyn DeviceLink) {
    let mut values = pattern(1, 1000);
    let host = Bytes::copy_from_slice(&values);
    let device = link.upload(&host).unwrap();
    let mut host = host.try_into_mut().expect("the link kept nothing of the host's buffer");
    host.fill(0);
    let back = link.download(&device).unwrap();
    drop(device);
    // A buffer of the same size may reuse the memory of the freed one.
    let next = link.upload(&Bytes::from(pattern(2, 1000))).unwrap();
    let next = link.download(&next).unwrap();
    assert_eq!((back, next), (Bytes::from(std::mem::take(&mut values)), pattern(2, 1000).into()));
}

fn views_keep_the_host_from_writing(link: &dyn DeviceLink) {
    let (up, down) = (link.moved(Direction::Upload), link.moved(Direction::Download));
    let host = aligned(&pattern(1, 1000));
    let device = link.upload(&host).unwrap();
    let back = link.download(&device).unwrap();
    let views = [device.as_host(), Some(&back)];
    assert!(views.iter().all(|view| view.unwrap().as_ptr() == host.as_ptr()), "the same memory");
    assert_eq!((link.moved(Direction::Upload), link.moved(Direction::Download)), (up, down));
    drop((host, device));
    assert_eq!(back, pattern(1, 1000), "the last view keeps the memory");
}

/// A buffer aligned as programs allocate it for tensors.
pub(crate) fn aligned(bytes: &[u8]) -> Bytes {
    Bytes::from_owner(AlignedBytes::fill(allocate(bytes.len()).unwrap(), bytes))
}

fn floats_are_copied(link: &dyn DeviceLink) {
    let down = link.moved(Direction::Download);
    let mut out = [f32::NAN; 5];
    let first = link.upload(&floats(&[1.0, -2.5, 0.0, 3e30, 7.0])).unwrap();
    link.download_into(&first, &mut out).unwrap();
    assert_eq!(out, [1.0, -2.5, 0.0, 3e30, 7.0]);
    // A view in the middle of a buffer: unaligned if the host can read it in place.
    let odd = usize::from(first.as_host().is_some());
    let mut shifted = vec![0; 4 - odd];
    shifted.extend_from_slice(bytemuck::cast_slice(&[4.0_f32, 5.0]));
    let second = link.upload(&Bytes::from(shifted)).unwrap();
    let second = second.slice(4 - odd..second.len());
    link.download_into(&second, &mut out[3..]).unwrap();
    assert_eq!(out, [1.0, -2.5, 0.0, 4.0, 5.0]);
    assert_eq!(link.moved(Direction::Download) - down, 20 + 8);
}

fn wrong_lengths_are_refused(link: &dyn DeviceLink) {
    let down = link.moved(Direction::Download);
    let device = link.upload(&floats(&[1.0, 2.0, 3.0])).unwrap();
    for (len, cut) in [(2, 0), (4, 0), (0, 0), (3, 4)] {
        let mut out = vec![9.0; len];
        let error = link.download_into(&device.slice(cut..12), &mut out).unwrap_err();
        let LinkError::Length { expected, found, .. } = error else { panic!("{error}") };
        assert_eq!((expected, found), (4 * len as u64, 12 - cut as u64));
        assert_eq!(out, vec![9.0; len]);
    }
    assert_eq!(link.moved(Direction::Download), down);
}

fn several_buffers_arrive_together(link: &dyn DeviceLink) {
    let hosts: Vec<Bytes> = [5, 0, 4096, 77, 100_003].map(|len| Bytes::from(pattern(len, len))).into();
    let devices = link.upload_all(&hosts).unwrap();
    let down = link.moved(Direction::Download);
    let mut back = link.download_all(&devices).unwrap();
    let moved = if link.zero_copy() { 0 } else { hosts.iter().map(|bytes| bytes.len() as u64).sum() };
    assert_eq!((&back, link.moved(Direction::Download) - down), (&hosts, moved));
    // Dropping one leaves the others unchanged.
    drop(back.remove(4));
    assert_eq!(back, hosts[..4]);
    assert!(link.download_all(&[]).unwrap().is_empty());
    // In another order, with one dropped early.
    let mut devices: Vec<_> = devices.into_iter().map(Some).collect();
    devices[2] = None;
    for i in [4, 0, 3, 1] {
        assert_eq!(link.download(&devices[i].take().unwrap()).unwrap(), hosts[i]);
    }
    assert!(link.upload_all(&[]).unwrap().is_empty());
}

fn copies_may_be_made_at_the_same_time(link: &dyn DeviceLink) {
    let (up, down) = (link.moved(Direction::Upload), link.moved(Direction::Download));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                for round in 0..50 {
                    let host = aligned(&pattern(thread * 100 + round, 5000));
                    let device = link.upload(&host).unwrap();
                    assert_eq!(link.download(&device).unwrap(), host);
                }
            });
        }
    });
    let moved = if link.zero_copy() { 0 } else { 4 * 50 * 5000 };
    assert_eq!(link.moved(Direction::Upload) - up, moved);
    assert_eq!(link.moved(Direction::Download) - down, moved);
}
