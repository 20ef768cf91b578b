//! AdamW with moments in 8 bits: Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022.

use super::{AdamW, Elements, MomentEncoding, Optimizer, Registered, Step};
use crate::{CoreError, Settings};

const NAME: &str = "adamw8bit";

pub(super) const REGISTERED: Registered = Registered {
    name: NAME,
    new: |lr, weight_decay| AdamW8bit(AdamW { weight_decay, ..AdamW::new(lr) }).into(),
    read: |settings| AdamW::read(settings).map(|rule| AdamW8bit(rule).into()),
};

/// [`AdamW`] with both moments in [8 bits](super::dynamic8), as bitsandbytes' `AdamW8bit`. Each step computes with the `f32`
/// values of the moments and rounds the new ones to 8 bits again. Parameters of fewer than
/// [`LARGE_PARAM`](crate::LARGE_PARAM) elements keep `f32` moments, as there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW8bit(pub AdamW);

impl Optimizer for AdamW8bit {
    fn name(&self) -> &str {
        NAME
    }

    fn settings(&self) -> Settings {
        self.0.settings()
    }

    fn lr(&self) -> f64 {
        self.0.lr()
    }

    fn moments(&self) -> usize {
        self.0.moments()
    }

    fn encoding(&self, moment: usize) -> MomentEncoding {
        if moment == 0 { MomentEncoding::Signed8 } else { MomentEncoding::Unsigned8 }
    }

    fn validate(&self) -> Result<(), CoreError> {
        self.0.validate()
    }

    fn update(&self, step: &Step, elements: Elements<'_, '_>) {
        self.0.update(step, elements);
    }
}

#[cfg(test)]
mod tests {
    use super::super::dynamic8::{self, BLOCK};
    use super::super::{MomentLayout, MomentMut};
    use super::*;
    use crate::{Encoding, FloatType, Init, LARGE_PARAM, OptimizerSpec, ParamBufferLayout};

    /// What bitsandbytes computed; `make_adamw8bit.py` documents the content.
    const FIXTURE: &[u8] = include_bytes!("../../tests/fixtures/adamw8bit.bin");
    const LEN: usize = 4133;

    fn floats(bytes: &mut &[u8], count: usize) -> Vec<f32> {
        let floats = bytes.split_off(..count * 4).unwrap().chunks_exact(4);
        floats.map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect()
    }

    /// A trained buffer of parameters with these lengths.
    fn buffer(lens: &[usize]) -> ParamBufferLayout {
        let mut buffer = ParamBufferLayout {
            name: "b".to_owned(),
            params: Vec::new(),
            elements: 0,
            layers: vec![0],
            trained: true,
            float: FloatType::F32,
            encoding: Encoding::Masters,
        };
        for (index, &len) in lens.iter().enumerate() {
            buffer.push(format!("p{index}"), vec![len], Init::Zeros, None);
        }
        buffer
    }

    fn mix(x: u32) -> u32 {
        let x = (x ^ x >> 15).wrapping_mul(0x2C1B_3CE5);
        let x = (x ^ x >> 12).wrapping_mul(0x297A_2D39);
        x ^ x >> 15
    }

    /// The gradients of the fixture.
    fn gradient(step: usize) -> Vec<f32> {
        const WITHIN: [f32; 4] = [1.0, 0.5, 0.125, 0.0625];
        const BLOCKS: [f32; 6] = [1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-6];
        let of = |i: u32| {
            let x = mix((step as u32).wrapping_mul(0x9E37_79B1) ^ i.wrapping_mul(0x85EB_CA77));
            let uniform = (x >> 8) as f32 / (1 << 24) as f32 - 0.5;
            let is_zero = i.is_multiple_of(11) || (512..768).contains(&i);
            let scale = (WITHIN[i as usize % 4], BLOCKS[i as usize / BLOCK % 6]);
            match is_zero {
                true => 0.0,
                false => (uniform + 0.25 * ((i % 3) as f32 - 1.0)) * scale.0 * scale.1,
            }
        };
        (0..LEN as u32).map(of).collect()
    }

    /// A parameter with its moments, as a store has them.
    struct Stepped {
        params: Vec<f32>,
        layouts: Vec<MomentLayout>,
        words: Vec<Vec<f32>>,
        buffer: ParamBufferLayout,
    }

    impl Stepped {
        fn new(lens: &[usize], value: impl Fn(usize) -> f32) -> Self {
            let buffer = buffer(lens);
            let layouts = OptimizerSpec::from(rule()).moment_layouts(&buffer);
            let words =
                layouts.iter().map(|layout| vec![0.0; layout.words_of(0..buffer.elements).len()]).collect();
            Self { params: (0..buffer.elements).map(value).collect(), layouts, words, buffer }
        }

        fn moments(&mut self, param: usize) -> Vec<MomentMut<'_>> {
            let elements = self.buffer.params[param].range();
            let moments = self.words.iter_mut().zip(&self.layouts);
            moments.map(|(words, layout)| layout.slice(words, 0, elements.clone())).collect()
        }

        /// Steps a parameter in chunks of this many elements.
        fn step(&mut self, param: usize, index: usize, grads: &[f32], chunk: usize) {
            let step = Step { index, rate: 1e-2, decays: true };
            let (mut params, range) = (self.params.clone(), self.buffer.params[param].range());
            let chunks = self.moments(param).into_iter().map(|moment| moment.chunks(chunk));
            let mut chunks: Vec<_> = chunks.collect();
            let values = params[range.clone()].chunks_mut(chunk).zip(grads.chunks(chunk));
            let mut stepped = Vec::new();
            for (values, grads) in values {
                let mut moments: Vec<_> = chunks.iter_mut().map(|of| of.next().unwrap()).collect();
                rule().update(&step, Elements::new(values, grads, &mut moments, None));
                stepped.extend_from_slice(values);
            }
            drop(chunks);
            self.params[range].copy_from_slice(&stepped);
        }
    }

    fn rule() -> AdamW8bit {
        AdamW8bit(AdamW::new(1e-2))
    }

    #[test]
    fn maps_are_those_of_bitsandbytes() {
        let mut fixture = FIXTURE;
        for map in [&dynamic8::SIGNED, &dynamic8::UNSIGNED] {
            let bits = |x: &f32| x.to_bits();
            let expected = floats(&mut fixture, 256);
            assert!(map.values().iter().map(bits).eq(expected.iter().map(bits)));
        }
    }

    /// The distance to the neighbours of each value in its block.
    fn steps(map: &[f32; 256], codes: &[u8], scales: &[f32]) -> Vec<f32> {
        let gap = |code: usize| map[(code + 1).min(255)] - map[code.saturating_sub(1)];
        codes.iter().enumerate().map(|(i, code)| gap(usize::from(*code)) * scales[i / BLOCK]).collect()
    }

    #[test]
    fn moments_stay_within_a_step_of_the_format_of_those_of_bitsandbytes() {
        let mut fixture = &FIXTURE[2048..];
        let mut own = Stepped::new(&[LEN], |i| (i % 17) as f32 / 8.0 - 1.0);
        for step in 0..100 {
            own.step(0, step, &gradient(step), 1 << 14);
            if step != 0 && step != 99 {
                continue;
            }
            let params = floats(&mut fixture, LEN);
            let most = own.params.iter().zip(&params).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
            assert!(
                most < 2e-3 * (step + 1) as f32 / 100.0 + 1e-6,
                "step {step}: parameters differ by {most}"
            );
            let maps = [&dynamic8::SIGNED, &dynamic8::UNSIGNED];
            for (map, mut moment) in maps.into_iter().zip(own.moments(0)) {
                let codes = fixture.split_off(..LEN).unwrap();
                let scales = floats(&mut fixture, LEN.div_ceil(BLOCK));
                let steps = steps(map.values(), codes, &scales);
                for (i, value) in moment.values().iter().enumerate() {
                    let expected = map.values()[usize::from(codes[i])] * scales[i / BLOCK];
                    let differ = (value - expected).abs();
                    assert!(differ <= steps[i], "step {step}, {i}: {value} and {expected}, {}", steps[i]);
                }
            }
        }
        assert!(fixture.is_empty());
    }

    #[test]
    fn blocks_are_counted_from_each_parameter_and_small_ones_have_floats() {
        let buffer = buffer(&[130, LARGE_PARAM + 100, 7, LARGE_PARAM]);
        let offsets: Vec<usize> = buffer.params.iter().map(|param| param.offset).collect();
        assert_eq!(offsets, [0, 256, 4480, 4608]);
        let layout = MomentLayout::new(MomentEncoding::Signed8, &buffer);
        let quantized: Vec<bool> = buffer.params.iter().map(|param| layout.is_quantized(param)).collect();
        assert_eq!(quantized, [false, true, false, true]);
        let of = |param: usize| layout.bytes_of(buffer.params[param].range());
        let second = 256 * 4 + 16 * 260 + 4 + 128;
        assert_eq!([of(0), of(1)], [0..520, 1024..1024 + 16 * 260 + 104]);
        assert_eq!([of(2), of(3)], [second..second + 28, second + 512..second + 512 + 16 * 260]);
        // A buffer may be cut at each multiple of 256.
        assert_eq!(layout.bytes_of(256..512), 1024..1284);
        let small = MomentLayout::new(MomentEncoding::Unsigned8, &self::buffer(&[4095]));
        assert_eq!((small.bytes_of(3..5), small), (12..20, MomentLayout::default()));
    }

    #[test]
    fn chunks_give_the_bits_of_the_whole() {
        let lens = [300, LEN];
        let run = |chunk: usize| {
            let mut own = Stepped::new(&lens, |i| i as f32 * 1e-3);
            for step in 0..3 {
                own.step(0, step, &gradient(step)[..300], chunk);
                own.step(1, step, &gradient(step + 7), chunk);
            }
            let bits = |values: &Vec<f32>| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            (bits(&own.params), own.words.iter().map(bits).collect::<Vec<_>>())
        };
        let whole = run(1 << 14);
        assert_eq!((run(256), run(1024)), (whole.clone(), whole.clone()));
        // A small parameter is stepped as by AdamW.
        let (mut params, mut moments) =
            ((0..300).map(|i| i as f32 * 1e-3).collect::<Vec<_>>(), [[0.0; 300]; 2]);
        for index in 0..3 {
            let mut moments: Vec<_> = moments.iter_mut().map(|m| MomentMut::Floats(m)).collect();
            let grads = gradient(index);
            let elements = Elements::new(&mut params, &grads[..300], &mut moments, None);
            rule().0.update(&Step { index, rate: 1e-2, decays: true }, elements);
        }
        assert!(params.iter().map(|x| x.to_bits()).eq(whole.0[..300].iter().copied()));
    }

    #[test]
    fn signs_and_zeros_are_kept() {
        let mut own = Stepped::new(&[LARGE_PARAM], |_| 0.0);
        let zeros = own.words.clone();
        let mut grads = vec![0.0; LARGE_PARAM];
        own.step(0, 0, &grads, 256);
        assert_eq!(
            (&own.words, &own.params),
            (&zeros, &vec![0.0; LARGE_PARAM]),
            "nothing changes without a gradient"
        );
        (grads[0], grads[1], grads[2]) = (1.0, -1e-9, 1e-9);
        own.step(0, 1, &grads, 256);
        let [mut m, mut v] = <[_; 2]>::try_from(own.moments(0)).unwrap();
        let (m, v) = (m.values(), v.values());
        assert!(m[1] < 0.0 && m[1] > -1e-6 && m[2] == 0.0 && m[3] == 0.0, "{:?}", &m[..4]);
        assert!((m[0] - 0.1).abs() < 1e-6 && (v[0] - 1e-3).abs() < 1e-8 && v[1] == 0.0);
    }

    #[test]
    fn it_is_known_to_files() {
        let text = "name = \"adamw8bit\"\nlr = 0.001\nbeta1 = 0.9\nbeta2 = 0.999\neps = 0.00000001\nweight_decay = 0.01\n";
        let read: OptimizerSpec = toml::from_str(text).unwrap();
        assert_eq!(
            (toml::to_string(&read).unwrap().as_str(), &read),
            (text, &AdamW8bit(AdamW::new(1e-3)).into())
        );
        assert_ne!(read, OptimizerSpec::adamw(1e-3));
    }
}
