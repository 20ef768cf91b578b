//! The conformance suite of stores of all tiers.

use super::*;
use crate::Budget;
use crate::{Floats, NarrowFloats};
use hydra_core::optimizer::{MomentEncoding, MomentLayout};
use hydra_core::{BufferParam, ByteSize, Encoding, FloatType, Init, ParamBufferLayout, TaskId};

pub(crate) const ID: ParamBufferId = ParamBufferId::new(TaskId(3), 5);

pub(crate) fn budget() -> Budget {
    Budget::new("host memory", ByteSize::mib(1))
}

pub(crate) fn masters() -> Masters {
    let ramp = |scale: f32| (0..300).map(|i| i as f32 * scale).collect::<Vec<_>>();
    Masters::new(ramp(1.0), vec![ramp(0.5), ramp(-0.25)])
}

pub(crate) fn insert(store: &dyn TierStore, id: ParamBufferId, budget: &Budget) {
    let masters = masters();
    let reservation = budget.reserve(masters.len_bytes(), id.to_string()).unwrap();
    store.insert(id, masters, reservation).unwrap();
}

/// Runs the suite; `make` returns an empty store.
pub(crate) fn run(make: &dyn Fn() -> std::sync::Arc<dyn TierStore>) {
    what_goes_in_comes_out(make().as_ref());
    what_does_not_belong_is_refused(make().as_ref());
    of_several_insertions_at_once_one_succeeds(make().as_ref());
    views_hold_off_writers(make().as_ref());
    a_writer_holds_off_everyone(make().as_ref());
    writers_put_back_what_they_wrote(make().as_ref());
    nobody_sees_half_of_a_write(make().as_ref());
    what_moves_is_what_the_masters_were_rounded_to(make().as_ref());
    pieces_are_read_and_rewritten_in_order(make().as_ref());
    parts_are_written_and_empty_moments_are_zeros(make().as_ref());
}

fn floats(view: &ParamBufferView) -> &[f32] {
    bytemuck::cast_slice(&view.bytes)
}

fn busy_with(result: Result<(), SpillError>) -> Option<usize> {
    match result {
        Err(SpillError::BufferBusy { buffer, readers }) => {
            assert_eq!(buffer, ID);
            Some(readers)
        }
        _ => None,
    }
}

fn what_goes_in_comes_out(store: &dyn TierStore) {
    let budget = budget();
    let other = ParamBufferId { task: TaskId(2), ..ID };
    insert(store, ID, &budget);
    insert(store, other, &budget);
    let best = Masters::new(vec![7.0; 4], Vec::new());
    store.insert(ID.snapshot(), best.clone(), budget.reserve(16, "best").unwrap()).unwrap();
    assert_eq!(budget.used(), 2 * masters().len_bytes() + 16);
    let mut writer = store.write(ID.snapshot()).unwrap();
    writer.params[3] = 8.0;
    writer.commit();
    let view = store.read_masters(ID.snapshot()).unwrap();
    assert_eq!((floats(&view), view.version), (&[7.0, 7.0, 7.0, 8.0][..], 1));
    drop(view);
    store.discard(ID.snapshot()).unwrap();
    let view = store.read(ID).unwrap();
    assert_eq!((floats(&view), view.version), (&masters().params[..], 0));
    drop(view);
    assert_eq!(store.remove(ID).unwrap(), masters());
    assert_eq!(budget.used(), masters().len_bytes());
    let missing = |result| matches!(result, Err(SpillError::BufferMissing { buffer: ID }));
    assert!(missing(store.read(ID).map(drop)));
    assert!(missing(store.write(ID).map(drop)));
    assert!(missing(store.version(ID).map(drop)));
    assert!(missing(store.remove(ID).map(drop)));
    assert_eq!(store.remove(other).unwrap(), masters());
    assert_eq!(budget.used(), 0);
}

fn what_does_not_belong_is_refused(store: &dyn TierStore) {
    let budget = budget();
    let reserve = |bytes| budget.reserve(bytes, "someone").unwrap();
    let needed = masters().len_bytes();
    let small = store.insert(ID, masters(), reserve(needed - 1));
    let Err(SpillError::ReservationTooSmall { needed: n, reserved, owner }) = small else {
        panic!("expected a reservation that is too small, found {small:?}")
    };
    assert_eq!((n, reserved, owner.as_str()), (needed, needed - 1, "someone"));
    let uneven = Masters { moments: vec![vec![0.0; 300].into(), vec![0.0; 299].into()], ..masters() };
    let uneven = store.insert(ID, uneven, reserve(needed));
    assert!(matches!(uneven, Err(SpillError::MomentLength { params: 300, moment: 1, found: 299, .. })));
    assert_eq!(budget.used(), 0, "a refused insertion releases its reservation");

    insert(store, ID, &budget);
    let again = store.insert(ID, Masters::default(), reserve(0));
    assert!(matches!(again, Err(SpillError::BufferExists { buffer: ID })));
    assert_eq!(store.remove(ID).unwrap(), masters());
}

fn of_several_insertions_at_once_one_succeeds(store: &dyn TierStore) {
    let (budget, start) = (budget(), std::sync::Barrier::new(4));
    let insert = || {
        let reservation = budget.reserve(masters().len_bytes(), "someone").unwrap();
        start.wait();
        store.insert(ID, masters(), reservation).is_ok()
    };
    let inserted = std::thread::scope(|scope| {
        let threads = [(); 4].map(|()| scope.spawn(insert));
        threads.map(|thread| usize::from(thread.join().unwrap())).iter().sum::<usize>()
    });
    assert_eq!((inserted, budget.used()), (1, masters().len_bytes()));
}

fn views_hold_off_writers(store: &dyn TierStore) {
    let budget = budget();
    insert(store, ID, &budget);
    let (one, two) = (store.read(ID).unwrap(), store.read(ID).unwrap());
    assert_eq!(busy_with(store.write(ID).map(drop)), Some(2));
    drop(two);
    let slice = one.bytes.slice(8..16);
    drop(one);
    assert_eq!(busy_with(store.write(ID).map(drop)), Some(1));
    assert_eq!(busy_with(store.remove(ID).map(drop)), Some(1));
    assert_eq!(bytemuck::cast_slice::<u8, f32>(&slice), [2.0, 3.0]);
    assert_eq!(floats(&store.read(ID).unwrap()), &masters().params[..]);
    drop(slice);
    drop(store.write(ID).unwrap());
    assert_eq!(store.remove(ID).unwrap(), masters());
}

fn a_writer_holds_off_everyone(store: &dyn TierStore) {
    let budget = budget();
    insert(store, ID, &budget);
    let writer = store.write(ID).unwrap();
    assert_eq!(busy_with(store.read(ID).map(drop)), Some(0));
    assert_eq!(busy_with(store.write(ID).map(drop)), Some(0));
    assert_eq!(busy_with(store.remove(ID).map(drop)), Some(0));
    assert_eq!(store.version(ID).unwrap(), 0);
    assert_eq!(budget.used(), masters().len_bytes(), "a writer's masters stay charged");
    drop(writer);
    assert!(store.read(ID).is_ok());
}

fn writers_put_back_what_they_wrote(store: &dyn TierStore) {
    let budget = budget();
    insert(store, ID, &budget);
    let mut expected = masters();
    for version in 1..4 {
        let mut writer = store.write(ID).unwrap();
        assert_eq!(*writer, expected);
        writer.params[version] = -1.0;
        writer.moments[1].words[version] = 7.0;
        writer.commit();
        expected.params[version] = -1.0;
        expected.moments[1].words[version] = 7.0;
        assert_eq!(store.version(ID).unwrap(), version as u64);
        let view = store.read(ID).unwrap();
        assert_eq!((floats(&view), view.version), (&expected.params[..], version as u64));
    }
    drop(store.write(ID).unwrap());
    assert_eq!(store.version(ID).unwrap(), 3);
    assert_eq!(store.remove(ID).unwrap(), expected);
}

fn pieces_are_read_and_rewritten_in_order(store: &dyn TierStore) {
    let budget = budget();
    let narrow = |values: &[f32]| Some(NarrowFloats::of(values, FloatType::Bf16, Floats::from));
    let mut expected = Masters { narrow: narrow(&masters().params), ..masters() };
    store.insert(ID, expected.clone(), budget.reserve(5000, "someone").unwrap()).unwrap();
    let mut next = 0;
    let mut rewrite = |start: usize, piece: &mut Masters| {
        assert_eq!(start, next);
        next += piece.params.len();
        let own = start..next;
        assert_eq!(
            (&piece.params[..], &piece.moments[1].words[..]),
            (&expected.params[own.clone()], &expected.moments[1].words[own])
        );
        piece.params.iter_mut().for_each(|value| *value += 0.5);
        piece.moments[0].words.fill(start as f32);
        piece.round();
        Ok(())
    };
    store.write_pieces(ID, &mut rewrite).unwrap();
    assert_eq!((next, store.version(ID).unwrap()), (300, 1));
    expected.params.iter_mut().for_each(|value| *value += 0.5);
    expected.narrow = narrow(&expected.params);
    let read = |part, elements: Range<usize>| store.read_part(ID, part, elements).unwrap();
    expected.moments[0].words.copy_from_slice(floats(&read(MastersPart::Moment(0), 0..300)));
    for (part, elements) in [
        (MastersPart::Params, 0..300),
        (MastersPart::Params, 7..8),
        (MastersPart::Moment(0), 130..300),
        (MastersPart::Moment(1), 299..300),
    ] {
        let view = read(part, elements.clone());
        assert_eq!((floats(&view), view.version), (&expected.part(part)[elements], 1));
        assert_eq!(busy_with(store.write_pieces(ID, &mut |_, _| Ok(()))), Some(1));
    }
    let refused =
        store.write_pieces(ID, &mut |_, _| Err(SpillError::BufferMissing { buffer: ID.snapshot() }));
    assert!(matches!(refused, Err(SpillError::BufferMissing { .. })));
    assert_eq!((store.version(ID).unwrap(), store.remove(ID).unwrap()), (1, expected));
    let missing = store.write_pieces(ID, &mut |_, _| panic!("there are no master weights"));
    assert!(matches!(missing, Err(SpillError::BufferMissing { buffer: ID })));
    assert!(matches!(
        store.read_part(ID, MastersPart::Params, 0..1),
        Err(SpillError::BufferMissing { buffer: ID })
    ));
}

fn parts_are_written_and_empty_moments_are_zeros(store: &dyn TierStore) {
    let budget = budget();
    let narrow = |values: &[f32]| Some(NarrowFloats::of(values, FloatType::Bf16, Floats::from));
    let mut expected = Masters { moments: vec![vec![0.0; 300].into(); 2], ..masters() };
    expected.narrow = narrow(&expected.params);
    let first = Masters { moments: vec![Moment::default(); 2], ..expected.clone() };
    store.insert(ID, first, budget.reserve(4200, "someone").unwrap()).unwrap();
    assert_eq!((&*store.write(ID).unwrap(), store.version(ID).unwrap()), (&expected, 0));
    for part in [MastersPart::Moment(1), MastersPart::Params] {
        let values: Vec<f32> = expected.part(part).iter().map(|value| value - 2.5).collect();
        store.write_part(ID, part, 0..300, &values).unwrap();
        expected.part_mut(part).copy_from_slice(&values);
    }
    expected.narrow = narrow(&expected.params);
    assert_eq!((&*store.write(ID).unwrap(), store.version(ID).unwrap()), (&expected, 2));
    let view = store.read(ID).unwrap();
    assert_eq!(busy_with(store.write_part(ID, MastersPart::Params, 0..300, &[0.0; 300])), Some(1));
    drop(view);
    assert_eq!(store.remove(ID).unwrap(), expected);
}

fn nobody_sees_half_of_a_write(store: &dyn TierStore) {
    let budget = budget();
    let zeros = Masters::new(vec![0.0; 4096], Vec::new());
    let reservation = budget.reserve(zeros.len_bytes(), "zeros").unwrap();
    store.insert(ID, zeros, reservation).unwrap();
    let read = || {
        for _ in 0..500 {
            match store.read(ID) {
                Ok(view) => assert!(floats(&view).iter().all(|x| *x == view.version as f32)),
                Err(error) => assert_eq!(busy_with(Err(error)), Some(0)),
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(read);
        scope.spawn(read);
        // Readers stop eventually, so the writer gets access.
        while store.version(ID).unwrap() < 100 {
            let next = store.version(ID).unwrap() + 1;
            match store.write(ID) {
                Ok(mut writer) => {
                    writer.params.fill(next as f32);
                    writer.commit();
                }
                Err(_) => std::thread::yield_now(),
            }
        }
    });
    assert!(floats(&store.read(ID).unwrap()).iter().all(|x| *x == 100.0));
}

fn what_moves_is_what_the_masters_were_rounded_to(store: &dyn TierStore) {
    let budget = budget();
    let values: Vec<f32> = (0..301).map(|i| i as f32 * 0.1 - 7.0).collect();
    let narrow = |values: &[f32]| NarrowFloats::of(values, FloatType::Bf16, Floats::from);
    let with = |narrow| Masters { narrow: Some(narrow), ..Masters::new(values.clone(), Vec::new()) };
    let reserve = |bytes| budget.reserve(bytes, "someone").unwrap();
    let short = store.insert(ID, with(narrow(&values[1..])), reserve(2000));
    assert!(matches!(short, Err(SpillError::NarrowLength { params: 301, found: 300, .. })));
    let small = store.insert(ID, with(narrow(&values)), reserve(301 * 6 - 1));
    assert!(matches!(small, Err(SpillError::ReservationTooSmall { needed: 1806, .. })));
    store.insert(ID, with(narrow(&values)), reserve(301 * 6)).unwrap();

    let (moving, masters) = (store.read(ID).unwrap(), store.read_masters(ID).unwrap());
    assert_eq!(
        (bytemuck::cast_slice::<u8, u16>(&moving.bytes), floats(&masters)),
        (&*narrow(&values), &values[..])
    );
    drop(moving);
    assert_eq!(busy_with(store.write(ID).map(drop)), Some(1));
    drop(masters);
    let moving = store.read(ID).unwrap();
    assert_eq!(busy_with(store.write(ID).map(drop)), Some(1));
    drop(moving);
    let mut writer = store.write(ID).unwrap();
    writer.params.fill(1.25);
    writer.round();
    writer.commit();
    let moving = store.read(ID).unwrap().bytes;
    assert_eq!(bytemuck::cast_slice::<u8, u16>(&moving), [0x3FA0; 301]);
    drop(moving);
    let mut written = Masters::new(vec![1.25; 301], Vec::new());
    written.narrow = Some(narrow(&written.params));
    assert_eq!((store.remove(ID).unwrap(), budget.used()), (written, 0));
}

/// A buffer of a small parameter and a quantized one, which ends with a shorter block.
fn mixed() -> ParamBufferLayout {
    let param = |offset, len| BufferParam {
        name: format!("at {offset}"),
        shape: vec![len],
        offset,
        len,
        init: Init::Zeros,
        given: None,
        state: None,
    };
    ParamBufferLayout {
        name: "mixed".to_owned(),
        params: vec![param(0, 130), param(256, 4196)],
        elements: 4480,
        layers: vec![0],
        trained: true,
        float: FloatType::F32,
        encoding: Encoding::Masters,
    }
}

/// Runs the suite of quantized moments; `make` returns an empty store whose pieces consist of whole blocks.
pub(crate) fn run_quantized(make: &dyn Fn() -> std::sync::Arc<dyn TierStore>) {
    let (store, budget, buffer) = (make(), budget(), mixed());
    let layouts =
        [MomentEncoding::Signed8, MomentEncoding::Unsigned8].map(|of| MomentLayout::new(of, &buffer));
    let first = Masters::new(vec![1.5; 4480], Vec::new()).with_moments(layouts.to_vec());
    let bytes = 4 * 4480 + 2 * (4 * 256 + 16 * 260 + 4 + 128);
    assert_eq!(first.len_bytes(), bytes);
    let short = store.insert(ID, first.clone(), budget.reserve(bytes - 1, "someone").unwrap());
    assert!(matches!(short, Err(SpillError::ReservationTooSmall { .. })));
    store.insert(ID, first.clone(), budget.reserve(bytes, "someone").unwrap()).unwrap();
    let mut expected = first.with_zeros();
    assert_eq!(&*store.write(ID).unwrap(), &expected);

    for (moment, of) in expected.moments.iter_mut().enumerate() {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut of.words);
        bytes.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i / 7 + moment) as u8 % 64);
    }
    let mut rewrite = |start: usize, piece: &mut Masters| {
        let elements = start..start + piece.params.len();
        for (piece, whole) in piece.moments.iter_mut().zip(&expected.moments) {
            piece.words.copy_from_slice(&whole.words[whole.layout.words_of(elements.clone())]);
        }
        Ok(())
    };
    store.write_pieces(ID, &mut rewrite).unwrap();
    let compare = |expected: &Masters| {
        for (moment, of) in expected.moments.iter().enumerate() {
            let all: &[u8] = bytemuck::cast_slice(&of.words);
            for elements in [0..4480, 0..130, 256..512, 256..4452, 4352..4480] {
                let view = store.read_part(ID, MastersPart::Moment(moment), elements.clone()).unwrap();
                assert_eq!(&view.bytes[..], &all[layouts[moment].bytes_of(elements)]);
            }
        }
    };
    compare(&expected);
    expected.moments[1].words.fill(2.5);
    store.write_part(ID, MastersPart::Moment(1), 0..4480, &expected.moments[1].words).unwrap();
    compare(&expected);
    assert_eq!(store.remove(ID).unwrap(), expected);
    assert_eq!(budget.used(), 0);
}
