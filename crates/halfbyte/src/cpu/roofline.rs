//! What this CPU could do at most, measured: read bandwidth, and peaks of the instructions that the kernels rest on.

use super::Cpu;
use super::isa::Isa;
#[cfg(target_arch = "x86_64")]
use super::x86::amx::{ROW_BYTES, Tiles};
use crate::layout::Lines;
use crate::tensor::Float;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Upper limits of one device, all threads together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roofline {
    /// Bytes a second read from memory, each once, from a buffer far larger than the caches.
    pub read_bytes_per_second: f64,
    /// Multiplications and additions a second of int8 dot products.
    pub int8_ops_per_second: f64,
    /// Multiplications and additions a second of f32 multiply-adds.
    pub f32_flops_per_second: f64,
    /// Multiplications and additions a second of bf16 dot products; None without such instructions.
    pub bf16_flops_per_second: Option<f64>,
    /// Whether bf16 are multiplied in tiles (AMX), where exact activations of other types are the sum of several bf16.
    pub bf16_tiles: bool,
}

/// Size of the buffer that is read for the bandwidth.
const READ_BYTES: usize = 512 << 20;

impl Roofline {
    /// Multiplications and additions a second of codes by exact activations of a type, and what sets it.
    pub fn exact_flops_per_second(&self, x: Float) -> (f64, &'static str) {
        match (self.bf16_flops_per_second, self.bf16_tiles, x) {
            (Some(bf16), _, Float::BF16) => (bf16, "bf16 peak"),
            (Some(bf16), true, Float::F16) => (bf16 / 2.0, "half the bf16 peak"),
            (Some(bf16), true, Float::F32) => (bf16 / 3.0, "a third of the bf16 peak"),
            _ => (self.f32_flops_per_second, "f32 peak"),
        }
    }

    /// Measures for about a second: the best of several tries of each.
    pub fn measure(cpu: &Cpu) -> Self {
        let isa = cpu.caps().isa;
        Self {
            read_bytes_per_second: read_bandwidth(cpu),
            int8_ops_per_second: peak(cpu, |rounds| int8_ops(isa, rounds)),
            f32_flops_per_second: peak(cpu, |rounds| f32_flops(isa, rounds)),
            bf16_flops_per_second: (isa == Isa::Amx || cpu.caps().bf16_dot).then(|| peak(cpu, |n| bf16_flops(isa, n))),
            bf16_tiles: isa == Isa::Amx,
        }
    }
}

/// Bytes a second copied from memory to memory that the system hands out anew, in huge pages where it has them: what
/// loading weights is bound by, since the system clears each page before a program may write it.
pub fn copy_to_new_memory(cpu: &Cpu) -> f64 {
    let from = written();
    let piece = READ_BYTES / (cpu.threads().count() * 64);
    let seconds = (0..4).map(|_| {
        let mut to = Lines::zeroed(READ_BYTES);
        let pieces = from.as_slice::<u8>().chunks(piece).zip(to.as_mut_slice::<u8>().chunks_mut(piece));
        let pieces: Vec<_> = pieces.map(Mutex::new).collect();
        let start = Instant::now();
        cpu.threads().run(pieces.len(), &|i| {
            let mut piece = pieces[i].lock().unwrap_or_else(PoisonError::into_inner);
            let (from, to) = &mut *piece;
            to.copy_from_slice(from);
        });
        start.elapsed().as_secs_f64()
    });
    READ_BYTES as f64 / seconds.fold(f64::INFINITY, f64::min)
}

/// A buffer far larger than the caches. Written, since pages that never were are all one page of zeros.
fn written() -> Lines {
    let mut buffer = Lines::zeroed(READ_BYTES);
    buffer.as_mut_slice::<u64>().iter_mut().step_by(8).enumerate().for_each(|(i, w)| *w = i as u64);
    buffer
}

fn read_bandwidth(cpu: &Cpu) -> f64 {
    let buffer = written();
    let words = buffer.as_slice::<u64>();
    let pieces: Vec<&[u64]> = words.chunks(words.len() / (cpu.threads().count() * 16)).collect();
    let isa = cpu.caps().isa;
    let seconds = best_of(4, || {
        cpu.threads().run(pieces.len(), &|i| {
            black_box(xor(isa, pieces[i]));
        });
    });
    READ_BYTES as f64 / seconds
}

fn xor(isa: Isa, words: &[u64]) -> u64 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a `Caps` with this family is made only where the processor was found to have it.
        Isa::Avx512 | Isa::Amx => unsafe { x86::xor_avx512(words) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 | Isa::AvxVnni => unsafe { x86::xor_avx2(words) },
        _ => words.iter().fold(0, |a, b| a ^ b),
    }
}

/// Operations a second of `work`, which does as many rounds as it is told and returns how many operations those were.
fn peak(cpu: &Cpu, work: impl Fn(u64) -> u64 + Sync) -> f64 {
    const ROUNDS: u64 = 1 << 19;
    let ops = AtomicU64::new(0);
    let threads = cpu.threads().count();
    let seconds = best_of(6, || {
        ops.store(0, Ordering::Relaxed);
        cpu.threads().run(threads, &|_| {
            ops.fetch_add(work(ROUNDS), Ordering::Relaxed);
        });
    });
    ops.load(Ordering::Relaxed) as f64 / seconds
}

fn best_of(tries: usize, mut work: impl FnMut()) -> f64 {
    work();
    (0..tries)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min)
}

fn int8_ops(isa: Isa, rounds: u64) -> u64 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a `Caps` with this family is made only where the processor was found to have it.
        Isa::Amx => unsafe { Tiles::new(ROW_BYTES) }.repeat(false, rounds / 4),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 => unsafe { x86::int8_avx512(rounds) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::AvxVnni => unsafe { x86::int8_avxvnni(rounds) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 => unsafe { x86::int8_avx2(rounds) },
        _ => {
            let (mut sums, x) = ([0i32; 32], black_box([3i16; 32]));
            for _ in 0..rounds {
                for i in 0..32 {
                    sums[i] = sums[i].wrapping_add(i32::from(x[i]) * i32::from(black_box(x)[i]));
                }
            }
            black_box(sums);
            rounds * 64
        }
    }
}

fn f32_flops(isa: Isa, rounds: u64) -> u64 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a `Caps` with this family is made only where the processor was found to have it.
        Isa::Avx512 | Isa::Amx => unsafe { x86::f32_avx512(rounds) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 | Isa::AvxVnni => unsafe { x86::f32_avx2(rounds) },
        _ => {
            let (mut sums, x) = ([0f32; 32], black_box(0.999f32));
            for _ in 0..rounds {
                for sum in &mut sums {
                    *sum = *sum * x + x;
                }
            }
            black_box(sums);
            rounds * 64
        }
    }
}

fn bf16_flops(isa: Isa, rounds: u64) -> u64 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a `Caps` with this family is made only where the processor was found to have it.
        Isa::Amx => unsafe { Tiles::new(ROW_BYTES) }.repeat(true, rounds / 4),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: called only where bf16 dot products were found.
        _ => unsafe { x86::bf16_avx512(rounds) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("no bf16 dot products on this architecture: {rounds}"),
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    /// Independent sums, more than the latency of an instruction times how many begin in a clock.
    const SUMS: usize = 12;

    /// Bytes ahead of a read that are asked for.
    const AHEAD: usize = 2048;

    #[target_feature(enable = "avx512f")]
    pub(super) fn xor_avx512(words: &[u64]) -> u64 {
        let mut sums = [_mm512_setzero_si512(); 4];
        for chunk in words.as_chunks::<32>().0 {
            for i in 0..4 {
                let at = chunk[i * 8..(i + 1) * 8].as_ptr();
                _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>().wrapping_add(AHEAD));
                // SAFETY: 64 bytes, by the slice above.
                sums[i] = _mm512_xor_si512(sums[i], unsafe { _mm512_loadu_si512(at.cast()) });
            }
        }
        let sum = _mm512_xor_si512(_mm512_xor_si512(sums[0], sums[1]), _mm512_xor_si512(sums[2], sums[3]));
        _mm512_reduce_or_epi64(sum) as u64
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn xor_avx2(words: &[u64]) -> u64 {
        let mut sums = [_mm256_setzero_si256(); 4];
        for chunk in words.as_chunks::<16>().0 {
            for i in 0..4 {
                let at = chunk[i * 4..(i + 1) * 4].as_ptr();
                _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>().wrapping_add(AHEAD));
                // SAFETY: 32 bytes, by the slice above.
                sums[i] = _mm256_xor_si256(sums[i], unsafe { _mm256_loadu_si256(at.cast()) });
            }
        }
        let sum = _mm256_xor_si256(_mm256_xor_si256(sums[0], sums[1]), _mm256_xor_si256(sums[2], sums[3]));
        _mm256_extract_epi64::<0>(sum) as u64
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) fn int8_avx512(rounds: u64) -> u64 {
        let (a, b) = black_box((_mm512_set1_epi8(3), _mm512_set1_epi8(5)));
        let mut sums = [_mm512_setzero_si512(); SUMS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, a, b);
            }
        }
        black_box(sums);
        rounds * SUMS as u64 * 128
    }

    #[target_feature(enable = "avx2,avxvnni")]
    pub(super) fn int8_avxvnni(rounds: u64) -> u64 {
        let (a, b) = black_box((_mm256_set1_epi8(3), _mm256_set1_epi8(5)));
        let mut sums = [_mm256_setzero_si256(); SUMS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm256_dpbusd_avx_epi32(*sum, a, b);
            }
        }
        black_box(sums);
        rounds * SUMS as u64 * 64
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn int8_avx2(rounds: u64) -> u64 {
        let (a, b, ones) = black_box((_mm256_set1_epi8(3), _mm256_set1_epi8(5), _mm256_set1_epi16(1)));
        let mut sums = [_mm256_setzero_si256(); SUMS];
        for _ in 0..rounds {
            for sum in &mut sums {
                let pairs = _mm256_maddubs_epi16(_mm256_xor_si256(a, *sum), b);
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
            }
        }
        black_box(sums);
        rounds * SUMS as u64 * 64
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn f32_avx512(rounds: u64) -> u64 {
        let (a, b) = black_box((_mm512_set1_ps(0.999), _mm512_set1_ps(0.5)));
        let mut sums = [_mm512_setzero_ps(); SUMS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, a, b);
            }
        }
        black_box(sums);
        rounds * SUMS as u64 * 32
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn f32_avx2(rounds: u64) -> u64 {
        let (a, b) = black_box((_mm256_set1_ps(0.999), _mm256_set1_ps(0.5)));
        let mut sums = [_mm256_setzero_ps(); SUMS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, a, b);
            }
        }
        black_box(sums);
        rounds * SUMS as u64 * 16
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn bf16_avx512(rounds: u64) -> u64 {
        let bits = black_box(_mm512_set1_epi16(0x3f00));
        // SAFETY: 64 bytes of one as 64 bytes of the other; every bit pattern is a value of both.
        let a: __m512bh = unsafe { std::mem::transmute(bits) };
        let mut sums = [_mm512_setzero_ps(); SUMS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, a, a);
            }
        }
        black_box(sums);
        rounds * SUMS as u64 * 64
    }
}
