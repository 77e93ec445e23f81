//! Devices of each instruction set of this machine; what a model needs besides products on them.

mod attention;
mod nested;
mod nn;

use halfbyte::Cpu;
use halfbyte::cpu::isa::{Caps, Isa};

/// A device with each instruction set that this machine has.
pub fn with_each_isa(threads: usize) -> Vec<Cpu> {
    let found = Caps::detect();
    let caps = Isa::ALL.into_iter().filter_map(|isa| found.limited_to(isa).ok());
    caps.map(|caps| Cpu::with_caps(threads, caps).unwrap()).collect()
}

/// Likewise, and one without bf16 dot products where this machine has them: each set of capabilities that it can take on.
pub fn with_each_caps(threads: usize) -> Vec<Cpu> {
    let mut cpus = with_each_isa(threads);
    let found = Caps::detect();
    if found.bf16_dot {
        cpus.push(Cpu::with_caps(threads, Caps { bf16_dot: false, ..found }).unwrap());
    }
    cpus
}

/// Of these kernels those that this machine can run, by their names.
pub fn that_run_here<'a>(kernels: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let found = Caps::detect();
    let runs = |name: &&str| match *name {
        name if name.ends_with("bf16") => found.bf16_dot,
        name if name.ends_with("amx") => found.isa >= Isa::Amx,
        name if name.contains("avx512") => found.isa >= Isa::Avx512,
        name if name.ends_with("avxvnni") => found.limited_to(Isa::AvxVnni).is_ok(),
        name if name.contains("avx2") => found.isa >= Isa::Avx2,
        _ => true,
    };
    kernels.into_iter().filter(runs).collect()
}

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

#[test]
fn a_device_has_what_it_is_asked_for_or_is_not_made() {
    let error = Cpu::with_caps(1, Caps { isa: Isa::Plain, bf16_dot: true }).unwrap_err();
    assert!(error.to_string().starts_with("cpu: expected a processor with bf16 dot products"), "{error}");
    let found = Caps::detect();
    assert_eq!(Cpu::with_caps(1, found).unwrap().caps(), found);
}

/// Kernels for AVX-VNNI serve processors without AVX-512, which may be had without it; richer devices say so.
#[cfg(target_arch = "x86_64")]
#[test]
fn kernels_for_avx_vnni_run_where_nothing_richer_is_used() {
    use halfbyte::cpu::matmul::{explain, select};
    use halfbyte::kernel::Problem;
    use halfbyte::tensor::Float;
    let chosen = |isa, format: &str, m| {
        let caps = Caps { isa, bf16_dot: false };
        let format = Some(format.parse().unwrap());
        let problem = Problem { format, m, n: 64, k: 256, x: Float::F32, y: Float::F32 };
        let refusal = explain(&caps, &problem).into_iter().find(|(kernel, _)| kernel.name.ends_with("avxvnni"));
        (select(&caps, &problem).unwrap().name, refusal.and_then(|(_, reason)| reason).map(|reason| reason.to_string()))
    };
    assert_eq!(chosen(Isa::AvxVnni, "w4a8-g32", 3).0, "a8_avxvnni");
    assert_eq!(chosen(Isa::AvxVnni, "w4a16-g32", 1).0, "a16_avxvnni");
    assert_eq!(chosen(Isa::AvxVnni, "w4a16-g32", 2).0, "a16_avx2");
    assert_eq!(chosen(Isa::Avx2, "w4a8-g32", 3).0, "a8_avx2");
    let (kernel, refusal) = chosen(Isa::Avx512, "w4a8-g32", 3);
    assert_eq!(kernel, "a8_avx512vnni");
    assert!(refusal.is_some_and(|reason| reason.contains("no AVX-512, this device uses avx512")));
}
