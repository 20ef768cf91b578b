//! Throughput of the host-copy link in both directions.

use criterion::{BenchmarkId, Criterion, Throughput};
use hydra_core::DeviceId;
use hydra_spill::{DeviceLink, HostCopyLink};

fn copies(c: &mut Criterion) {
    let mut group = c.benchmark_group("host copy");
    for mib in [1usize, 16, 64] {
        let host = bytes::Bytes::from(vec![1u8; mib << 20]);
        let link = HostCopyLink::new(DeviceId(0));
        let device = link.upload(&host).expect("memory");
        let mut out = vec![0.0f32; (mib << 20) / 4];
        group.throughput(Throughput::Bytes((mib as u64) << 20));
        group.bench_with_input(BenchmarkId::new("up", mib), &host, |b, host| b.iter(|| link.upload(host)));
        group.bench_with_input(BenchmarkId::new("down", mib), &device, |b, device| {
            b.iter(|| link.download_into(device, &mut out));
        });
    }
    group.finish();
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    copies(&mut criterion);
    criterion.final_summary();
}
