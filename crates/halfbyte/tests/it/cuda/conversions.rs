//! Conversions of codes to halves in registers (`dequant.cuh`): every pattern of bits, every zero point, to the bit.

use super::{gpus, nvrtc};
use half::{bf16, f16};
use halfbyte::cuda::Gpu;
use halfbyte::cuda::driver::{Arg, Launch, Stream};
use halfbyte::cuda::sources::{Instance, Source};
use std::ops::RangeInclusive;

static CONVERSIONS: Source =
    Source { path: "test/conversions.cu", text: include_str!("conversions.cu"), parameters: &[] };

/// What a conversion is by its definition.
struct Conversion {
    kernel: &'static str,
    /// The first processor that has its instructions.
    since: u32,
    /// Bits of a code.
    bits: u32,
    /// For each half of each register: the bit of the word that its code begins at.
    begins: &'static [[u32; 2]],
    /// Zero points of the first register; the others of two rows have the `most` less them.
    zeros: RangeInclusive<u32>,
    /// None: the same zero point in all registers.
    most: Option<u32>,
    half: fn(f32) -> u16,
}

fn of_f16(value: f32) -> u16 {
    f16::from_f32(value).to_bits()
}

fn of_bf16(value: f32) -> u16 {
    bf16::from_f32(value).to_bits()
}

/// The A registers of a tensor core: rows R, R + 8, R, R + 8.
const NIBBLES: &[[u32; 2]] = &[[0, 16], [4, 20], [8, 24], [12, 28]];
/// The upper two bits of each.
const UPPER_OF_NIBBLES: &[[u32; 2]] = &[[2, 18], [6, 22], [10, 26], [14, 30]];
/// Bytes 0 and 2, 1 and 3.
const BYTES: &[[u32; 2]] = &[[0, 16], [8, 24]];

const ALL: [Conversion; 7] = [
    Conversion {
        kernel: "int2_half<0>",
        since: 75,
        bits: 2,
        begins: NIBBLES,
        zeros: 0..=4,
        most: Some(4),
        half: of_f16,
    },
    Conversion {
        kernel: "int2_half<1>",
        since: 75,
        bits: 2,
        begins: UPPER_OF_NIBBLES,
        zeros: 0..=4,
        most: Some(4),
        half: of_f16,
    },
    Conversion {
        kernel: "int4_half<0>",
        since: 75,
        bits: 4,
        begins: NIBBLES,
        zeros: 0..=16,
        most: Some(16),
        half: of_f16,
    },
    Conversion {
        kernel: "int4_bf16<0>",
        since: 80,
        bits: 4,
        begins: NIBBLES,
        zeros: 0..=16,
        most: Some(16),
        half: of_bf16,
    },
    Conversion {
        kernel: "int8_half<0>",
        since: 75,
        bits: 8,
        begins: BYTES,
        zeros: 0..=255,
        most: Some(255),
        half: of_f16,
    },
    Conversion {
        kernel: "int8_bf16<0>",
        since: 80,
        bits: 8,
        begins: BYTES,
        zeros: 128..=128,
        most: None,
        half: of_bf16,
    },
    Conversion {
        kernel: "int8_bf16_fp32<0>",
        since: 75,
        bits: 8,
        begins: BYTES,
        zeros: 128..=128,
        most: None,
        half: of_bf16,
    },
];

impl Conversion {
    fn instance(&self) -> Instance {
        Instance::new(&CONVERSIONS, self.kernel)
    }

    /// The registers that words become on a device, with a zero point.
    fn run(&self, gpu: &Gpu, stream: &Stream, words: &[u32], zero: u32) -> Vec<u32> {
        let context = gpu.context();
        let (mut from, mut to) = (
            context.allocate::<u32>(words.len()).unwrap(),
            context.allocate::<u32>(words.len() * self.begins.len()).unwrap(),
        );
        stream.upload(words, from.view_mut()).unwrap();
        let (words_at, out_at, count) = (from.view().pointer(), to.view_mut().pointer(), words.len() as u32);
        let args = [Arg::new(&words_at), Arg::new(&out_at), Arg::new(&count), Arg::new(&zero)];
        let launch = Launch::linear(count.div_ceil(256), 256);
        // SAFETY: the kernel takes two addresses and two numbers, reads `count` words and writes as many times its registers.
        unsafe { gpu.function(&self.instance()).unwrap().launch(stream, &launch, &args) }.unwrap();
        let mut out = vec![0; words.len() * self.begins.len()];
        stream.download(to.view(), &mut out).unwrap();
        out
    }

    /// For each register the halves that codes stand for: code less zero point.
    fn tables(&self, zero: u32) -> Vec<Vec<u16>> {
        let zero_of = |register: usize| match self.most {
            Some(most) if register % 2 == 1 => most - zero,
            _ => zero,
        };
        let codes = 0..1u32 << self.bits;
        let table = |register| codes.clone().map(|code| (self.half)(code as f32 - zero_of(register) as f32)).collect();
        (0..self.begins.len()).map(table).collect()
    }
}

#[test]
fn conversions_compile_for_every_processor_that_has_their_instructions() {
    let Some(nvrtc) = nvrtc() else { return };
    for (number, arch) in [(75, "sm_75"), (80, "sm_80"), (90, "sm_90a")] {
        for conversion in ALL.iter().filter(|conversion| conversion.since <= number) {
            nvrtc.compile(&conversion.instance(), arch.parse().unwrap()).unwrap_or_else(|e| panic!("{e}"));
        }
    }
}

#[test]
fn conversions_are_what_they_are_by_definition() {
    // Every pattern in each half of a word, beside another one.
    let words: Vec<u32> = (0..=0xffff).map(|low: u32| low | (low ^ 0xa5c3) << 16).collect();
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        for conversion in ALL.iter().filter(|conversion| conversion.since <= gpu.caps().arch.number) {
            for zero in conversion.zeros.clone() {
                let tables = conversion.tables(zero);
                let got = conversion.run(&gpu, &stream, &words, zero);
                for (word, registers) in words.iter().zip(got.chunks_exact(conversion.begins.len())) {
                    for ((register, table), begins) in registers.iter().zip(&tables).zip(conversion.begins) {
                        let code = |at: u32| (word >> at & ((1 << conversion.bits) - 1)) as usize;
                        let [low, high] = begins.map(|at| u32::from(table[code(at)]));
                        assert_eq!(*register, low | high << 16, "{} of {word:#x}, zero {zero}", conversion.kernel);
                    }
                }
            }
        }
    }
}
