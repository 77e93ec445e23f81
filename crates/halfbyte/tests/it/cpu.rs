//! What a model needs besides products, on each instruction set of this machine.

mod attention;
mod nn;

use halfbyte::Cpu;
use halfbyte::cpu::isa::{Caps, Isa};

/// For each instruction set of this machine: `result` with one thread and with three must have the same bits; they go to `check`.
fn on_every_cpu(result: impl Fn(&Cpu) -> Vec<f32>, check: impl Fn(Isa, &[f32])) {
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for isa in [Isa::Plain, Isa::Avx2, Isa::Avx512] {
        let Ok(caps) = Caps::detect().limited_to(isa) else { continue };
        let values = result(&Cpu::with_caps(1, caps).unwrap());
        let on_three = result(&Cpu::with_caps(3, caps).unwrap());
        assert_eq!(bits(&values), bits(&on_three), "{isa:?}: one thread and three");
        check(isa, &values);
    }
}

/// Numbers in −1 … 1 that look random.
fn noise(seed: u32, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_769) | 1;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..len).map(|_| next()).collect()
}
