//! Sums by sequence.

use super::kernels::sums;
use super::tensors::{arg, elements, rows, units, whole, whole_ids, wide};
use crate::ops::segments::{SegmentKernels, SegmentOps};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Cube, TensorMetadata};

impl SegmentOps for Cube {
    fn segment_sums(values: FloatTensor<Self>, segments: IntTensor<Self>, count: usize) -> FloatTensor<Self> {
        let ([values], segments) = (whole([values]), whole_ids(segments));
        let out = wide(&values, [count]);
        let (client, cubes) = (&out.client, rows(&out, count));
        sums::segment_sums::launch(client, cubes, units(), arg(&values), arg(&segments), arg(&out), f32::NAN);
        out
    }
}

impl SegmentKernels for Cube {
    fn spread(sums: FloatTensor<Self>, segments: IntTensor<Self>) -> FloatTensor<Self> {
        let ([sums], segments) = (whole([sums]), whole_ids(segments));
        let out = wide(&sums, segments.shape());
        let cubes = elements(&out, out.meta.num_elements());
        sums::spread::launch(&out.client, cubes, units(), arg(&sums), arg(&segments), arg(&out));
        out
    }
}
