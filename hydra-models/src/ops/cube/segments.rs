//! Sums by sequence, which are computed on CPUs only.

use super::head::NO_TOKEN_LOSSES;
use crate::ops::segments::{SegmentKernels, SegmentOps};
use burn::backend::Cube;
use burn::backend::tensor::{FloatTensor, IntTensor};

impl SegmentOps for Cube {
    fn segment_sums(_: FloatTensor<Self>, _: IntTensor<Self>, _: usize) -> FloatTensor<Self> {
        panic!("{NO_TOKEN_LOSSES}")
    }
}

impl SegmentKernels for Cube {
    fn spread(_: FloatTensor<Self>, _: IntTensor<Self>) -> FloatTensor<Self> {
        panic!("{NO_TOKEN_LOSSES}")
    }
}
