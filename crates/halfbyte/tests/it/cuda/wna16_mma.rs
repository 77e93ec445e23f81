//! The kernel by mma.sync: what the tests of all kernels do not reach.

use super::products::{Bench, TYPES, caps, check, formats_of_atoms, reference_of};
use super::{gpus, half_of};
use crate::data::{Random, parse, rounded, with_zeros_in_bytes};
use halfbyte::Float;
use halfbyte::cuda::Caps;
use halfbyte::cuda::matmul::wna16_mma::config;
use halfbyte::cuda::matmul::{self, Configuration, Epilogue, KERNELS, Kernel};
use halfbyte::cuda::tiled::{Form, Tile};
use halfbyte::format::reference::Bound;
use halfbyte::kernel::{Activation, Problem};
use halfbyte::layout::cuda_wna16::Atom;

fn kernel() -> &'static Kernel {
    KERNELS.iter().find(|kernel| kernel.name == "wna16_mma").unwrap()
}

/// Every configuration, also where another would be chosen, with tiles whole and cut either way.
#[test]
fn every_configuration_and_cut_is_within_the_bound() {
    for gpu in gpus().into_iter().filter(|gpu| (kernel().serves)(gpu.caps().arch)) {
        let stream = gpu.stream().unwrap();
        let mut random = Random(12);
        for (name, x_type) in [
            ("w4a16-g128", Float::F16),
            ("w4a16-g64-asym", Float::BF16),
            ("w8a16-g32-asym-sbf16", Float::F16),
            ("w4a16", Float::F16),
            ("w8a16-asym-sbf16", Float::BF16),
            ("w4a16-g32-float-sf32", Float::F16),
            ("w8a16-g16-sf32", Float::BF16),
            ("w4a16-g128-float-sf32", Float::BF16),
            ("w8a16-g32-float-sf32", Float::F16),
            ("w3a16-g16-float", Float::F16),
            ("w2a16-g64", Float::F16),
            ("w2a16-g128-asym", Float::BF16),
            ("w3a16-g32", Float::F16),
        ] {
            let (format, x_type) = (parse(name), half_of(&gpu, x_type));
            for [n, k, most] in [[1100, 4104, 300], [2048, 520, 700]] {
                let atom = Atom::of_any(format.weight, k).unwrap();
                let w = with_zeros_in_bytes(random.qtensor(format.weight, [n, k], false));
                let packed = matmul::pack_for(kernel(), &gpu, &stream, &w, format.act).unwrap();
                let x = rounded(&random.activations(most * k), x_type);
                let reference = reference_of(&x, most, &w, format.act);
                let configs = config::all(atom, x_type, &gpu.caps());
                let instances: Vec<_> = configs
                    .iter()
                    .map(|config| config.instance(&Form { x: x_type, ..Form::floats(atom, x_type) }, Activation::None))
                    .collect();
                gpu.prepare(&instances, |_| ()).unwrap();
                for (config, batch_invariant) in configs.into_iter().flat_map(|c| [(c, false), (c, true)]) {
                    let bench = Bench::new(kernel(), &gpu, &stream);
                    let bench = Bench { configuration: Some(config.into()), batch_invariant, ..bench };
                    let tokens = config.tokens;
                    for m in [1, tokens - 1, tokens, tokens + 1, most] {
                        let y = bench.forward(&packed, &x[..m * k], [x_type; 2], m, Epilogue::default());
                        let what = format!("{name} m={m} n={n} k={k} {config:?} {batch_invariant}");
                        check(&y, &reference, Bound::new(x_type, k), &what);
                    }
                }
            }
        }
    }
}

#[test]
fn an_invariant_row_has_the_same_bits_whatever_m_and_the_configuration_are() {
    for gpu in gpus().into_iter().filter(|gpu| (kernel().serves)(gpu.caps().arch)) {
        let stream = gpu.stream().unwrap();
        let mut random = Random(13);
        for (name, [n, k], act_order) in [
            ("w4a16-g128", [1100, 4104], false),
            ("w8a16-g32-asym", [600, 2560], true),
            ("w4a16", [300, 1000], false),
            ("w8a16-g64", [70, 264], false),
            ("w4a16-g32-float-sf32", [600, 2560], true),
            ("w8a16-g128-float", [20000, 512], false),
            ("w8a16-g16-sf32", [300, 1000], false),
        ] {
            let format = parse(name);
            let w = with_zeros_in_bytes(random.qtensor(format.weight, [n, k], act_order));
            let packed = matmul::pack_for(kernel(), &gpu, &stream, &w, format.act).unwrap();
            let x = rounded(&random.activations(600 * k), Float::F16);
            let types = [Float::F16, Float::F32];
            let run = |configuration: Option<Configuration>, m: usize| {
                let bench = Bench { configuration, batch_invariant: true, ..Bench::new(kernel(), &gpu, &stream) };
                bench.forward(&packed, &x[..m * k], types, m, Epilogue::default())
            };
            let all = run(None, 600);
            let reference = reference_of(&x, 600, &w, format.act);
            check(&all, &reference, Bound::new(Float::F32, k), name);
            for m in [1, 7, 16, 17, 33, 64, 65, 256, 257] {
                let y = run(None, m);
                assert!(y == all[..m * n], "{name} m={m}");
            }
            for config in config::all(Atom::of_any(format.weight, k).unwrap(), Float::F32, &gpu.caps()) {
                let y = run(Some(config.into()), 40);
                assert!(y == all[..40 * n], "{name} {config:?}");
            }
        }
    }
}

#[test]
fn configurations_fit_every_processor_and_cuts_follow_n_and_k() {
    let devices = [
        Caps { multiprocessors: 40, shared_bytes: 65_536, l2_bytes: 4 << 20, ..caps("sm_75") },
        caps("sm_90a"),
        Caps { multiprocessors: 108, shared_bytes: 166_912, l2_bytes: 40 << 20, ..caps("sm_80") },
        Caps { multiprocessors: 128, shared_bytes: 101_376, l2_bytes: 72 << 20, ..caps("sm_89") },
    ];
    for name in formats_of_atoms() {
        let weight = parse(&name).weight;
        for [n, k] in [[1, 8], [63, 136], [600, 1000], [4096, 4096], [21504, 14336], [1 << 20, 256]] {
            let atom = Atom::of_any(weight, k).unwrap();
            for (m, out) in (1..=300).chain([512, 1024, 4096, 1 << 20]).flat_map(|m| TYPES.map(|out| (m, out))) {
                for caps in &devices {
                    let shape = [m, n, k];
                    let c = config::config(atom, shape, out, caps);
                    let least = if config::copies_wait_in_registers(caps) { 2 } else { 3 };
                    let (what, shared) =
                        (format!("{name} {m} {n} {k}: {c:?}"), c.shared_bytes(&Form::floats(atom, out)));
                    assert!(config::all(atom, out, caps).contains(&c), "{what}");
                    assert!(shared <= caps.shared_bytes as usize && c.stages >= least, "{what}: {shared} bytes");
                    let s = config::schedule(c, shape, c.workers(atom, out, caps));
                    let tiles = m.div_ceil(c.tokens) * n.div_ceil(64).div_ceil(c.tile_strips());
                    assert!(s.workers >= 1 && s.rows * s.columns == tiles, "{what}: {s:?}");
                    assert_eq!(s.waves * s.workers + s.cut, tiles, "{what}: {s:?}");
                    assert!(s.sharers <= s.workers && (s.cut == 0) == (s.sharers == 0), "{what}: {s:?}");
                    assert!(c.parts_bytes(&s) <= 64 << 20, "{what}: {s:?}");
                }
            }
        }
    }
    let atom = Atom::of_any(parse("w4a16-g128").weight, 4096).unwrap();
    let chosen = |m, n, k| {
        let c = config::config(atom, [m, n, k], Float::F16, &devices[1]);
        let s = config::schedule(c, [m, n, k], c.workers(atom, Float::F16, &devices[1]));
        (c.tokens, c.tile_strips(), [c.step, c.stages], [s.waves, s.sharers, s.cut])
    };
    assert_eq!(chosen(1, 21504, 14336), (8, 4, [128, 6], [0, 252, 84]));
    assert_eq!(chosen(16, 21504, 14336), (16, 4, [128, 5], [0, 252, 84]));
    assert_eq!(chosen(64, 21504, 14336), (64, 4, [128, 6], [0, 252, 84]));
    assert_eq!(chosen(256, 21504, 14336), (64, 4, [128, 6], [2, 132, 72]));
    assert_eq!(chosen(16, 4096, 4096), (16, 2, [128, 6], [0, 256, 32]));
    assert_eq!(chosen(1024, 4096, 4096), (64, 4, [128, 6], [2, 0, 0]));
    let on_turing = |x| matmul::select(&caps("sm_75"), &problem(x), None).unwrap().name;
    assert_eq!([Float::F16, Float::BF16].map(on_turing), ["wna16_mma", "simt"]);
    for arch in ["sm_80", "sm_86", "sm_89", "sm_100a", "sm_120a"] {
        for x in [Float::F16, Float::BF16] {
            assert_eq!(matmul::select(&caps(arch), &problem(x), None).unwrap().name, "wna16_mma", "{arch}");
        }
    }
    for x in [Float::F16, Float::BF16] {
        assert_eq!(matmul::select(&caps("sm_90a"), &problem(x), None).unwrap().name, "wna16_sm90");
    }
}

fn problem(x: Float) -> Problem {
    Problem { format: Some(parse("w4a16-g128")), x, y: x, m: 5, n: 4096, k: 4096 }
}
