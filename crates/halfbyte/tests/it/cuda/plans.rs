//! What a weight holds for all numbers of rows, without a device: the choices at every number, what is compiled for them, the
//! workspace that is asked for, and what follows from a device's properties.

use super::products::{TYPES, caps};
use crate::data::{Random, parse};
use halfbyte::cuda::Caps;
use halfbyte::cuda::matmul::wna16_sm90::config;
use halfbyte::cuda::matmul::{self, Configuration, KERNELS, Kernel, Plans, every_instance};
use halfbyte::cuda::matmul::{wna8_mma, wna8_sm90, wna16_mma};
use halfbyte::cuda::tiled::Form;
use halfbyte::format::FORMATS;
use halfbyte::kernel::{Activation, Problem};
use halfbyte::layout::cuda_wna16::Atom;
use halfbyte::{Error, Float};
use std::collections::{BTreeMap, HashSet};

/// An H100 with HBM3.
const H100: Caps = Caps { memory_mb_per_s: 3_352_320, l2_bytes: 50 << 20, ..Caps::H200 };

const SHAPES: &[[usize; 2]] =
    &[[1, 8], [70, 136], [600, 1000], [4096, 4096], [6144, 4096], [1024, 8192], [21504, 14336], [64, 1 << 16]];

/// Devices with whatever numbers a processor may have.
fn devices(random: &mut Random) -> Vec<Caps> {
    let kinds = [("sm_75", 65_536), ("sm_80", 166_912), ("sm_86", 101_376), ("sm_89", 101_376), ("sm_90a", 232_448)];
    let mut all = vec![Caps::H200, H100];
    for (arch, shared_bytes) in kinds.into_iter().chain([("sm_100a", 232_448), ("sm_120a", 101_376)]) {
        let multiprocessors = 1 + random.below(200) as u32;
        let memory_mb_per_s = [0, 300_000, 900_000, 2_000_000, 8_000_000][random.below(5)];
        let cublaslt = random.below(2) == 0;
        all.push(Caps { multiprocessors, shared_bytes, memory_mb_per_s, cublaslt, ..caps(arch) });
    }
    all
}

/// Problems of one row with formats that have products on a GPU.
fn problems(random: &mut Random) -> Vec<Problem> {
    let mut all = Vec::new();
    for (i, name) in FORMATS.iter().enumerate() {
        let format = parse(name);
        for j in 0..2 {
            let [n, k] = SHAPES[random.below(SHAPES.len())];
            let x = if j == 0 { format.weight.scale } else { TYPES[i % 3] };
            let y = if j == 0 { Float::F32 } else { x };
            all.push(Problem { format: Some(format), x, y, m: 1, n, k });
        }
    }
    all
}

fn plans_of(caps: &Caps, problem: &Problem) -> Option<(Plans, &'static str)> {
    let layout = matmul::select(caps, problem, None).ok()?.layout;
    Some((Plans::new(*caps, *problem, layout).unwrap(), layout))
}

/// The choice at one number of rows, from the table.
fn chosen(caps: &Caps, problem: &Problem, layout: &str, invariant: bool) -> Option<(&'static Kernel, Configuration)> {
    let kernel = match invariant {
        false => matmul::select(caps, problem, Some(layout)).ok()?,
        true => {
            let one = Problem { m: 1, ..*problem };
            let mut all = KERNELS.iter().filter(|kernel| kernel.layout == layout);
            all.find(|kernel| kernel.choose(caps, &one, true).is_ok())?
        }
    };
    Some((kernel, kernel.choose(caps, problem, invariant).ok()?))
}

#[test]
fn plans_hold_the_choice_at_every_number_of_rows() {
    let mut random = Random(61);
    let mut seen = HashSet::new();
    for caps in devices(&mut random) {
        let problems = problems(&mut random);
        for problem in problems.iter().step_by(3) {
            let Some((plans, layout)) = plans_of(&caps, problem) else { continue };
            let few = (0..=520).filter(|m| caps == Caps::H200 || m % 7 == 0 || *m < 70);
            let many = (0..40).map(|i| 513 + random.below(1 << (10 + i / 2))).collect::<Vec<_>>();
            let edges = [511, 512, 513, 768, 769, 1024, 1025, 4096, 4097, 33_792, 33_793, 1 << 20, i32::MAX as usize];
            for m in few.chain(many).chain(edges) {
                for invariant in [false, true] {
                    let problem = Problem { m, ..*problem };
                    let what = format!("{problem}, invariant {invariant}, on {caps:?}");
                    match (plans.at(m, invariant), chosen(&caps, &problem, layout, invariant)) {
                        (Ok(plan), Some((kernel, configuration))) => {
                            assert!(std::ptr::eq(plan.kernel(), kernel), "{what}: {plan} and {}", kernel.name);
                            assert!(*plan.configuration() == configuration, "{what}: {plan} and {configuration}");
                            let needed = kernel.workspace_bytes(&caps, &problem);
                            assert!(plan.workspace_bytes() >= needed, "{what}: {plan}, {needed} bytes");
                            assert!(plans.workspace_bytes(m) >= needed, "{what}: {needed} bytes");
                            seen.insert(kernel.name);
                        }
                        (Err(Error::NoKernel { rejections, .. }), None) => assert!(!rejections.is_empty(), "{what}"),
                        (plan, other) => panic!("{what}: {plan:?} and {other:?}"),
                    }
                }
            }
        }
    }
    let all: HashSet<_> = KERNELS.iter().map(|kernel| kernel.name).collect();
    assert_eq!(seen, all);
}

/// Bytes for up to so many rows are enough for fewer, and not many times what they take.
#[test]
fn workspaces_are_enough_for_fewer_rows() {
    let mut random = Random(62);
    for problem in problems(&mut random).into_iter().step_by(5) {
        let Some((plans, layout)) = plans_of(&Caps::H200, &problem) else { continue };
        for most in [1, 17, 300, 600, 2000] {
            let bytes = plans.workspace_bytes(most);
            let needed = |m: usize| matmul::workspace_bytes(&Caps::H200, &Problem { m, ..problem }, layout).unwrap();
            let worst = (0..=most).map(needed).max().unwrap();
            assert!(bytes >= worst && bytes <= worst + (64 << 20), "{problem} to {most}: {bytes} of {worst}");
        }
    }
}

#[test]
fn cubins_have_every_instance_of_every_plan() {
    let mut random = Random(63);
    for caps in devices(&mut random) {
        for problem in problems(&mut random) {
            let Some((plans, _)) = plans_of(&caps, &problem) else { continue };
            let compiled: HashSet<String> = every_instance(caps.arch, problem.format.unwrap())
                .into_iter()
                .chain(matmul::auxiliary())
                .map(|instance| instance.to_string())
                .collect();
            for plan in plans.explain().into_iter().flatten() {
                for instance in
                    plan.configuration().instances(&Problem { m: plan.rows()[0], ..problem }, Activation::None)
                {
                    assert!(compiled.contains(&instance.to_string()), "{problem}: {plan}: {instance} on {caps:?}");
                }
            }
        }
    }
}

/// A product of a sweep (`bench matmul --sweep`), with the microseconds of the configurations that were timed; of up to 32 rows of those that may
/// be chosen.
struct Swept {
    caps: Caps,
    /// Drawn at random, for the model of the machine; listed; or drawn at random afterwards, to check it. Apart for up to 32 rows, and for
    /// weights with offsets and K types.
    kind: String,
    format: String,
    y: Float,
    shape: [usize; 3],
    times: Vec<(f64, String)>,
}

fn sweeps() -> Vec<Swept> {
    let h100 = include_str!("sweeps/nvidia-h100.txt").lines().map(|line| (H100, "H100", line));
    let h200 = include_str!("sweeps/nvidia-h200.txt").lines().map(|line| (Caps::H200, "H200", line));
    let codes = include_str!("sweeps/nvidia-h200-a8.txt").lines().map(|line| (Caps::H200, "H200 a8", line));
    let mut all: Vec<Swept> = Vec::new();
    let sync = include_str!("sweeps/nvidia-h200-sync.txt").lines().map(|line| (Caps::H200, "H200", line));
    for (caps, device, line) in h100.chain(h200).chain(codes).chain(sync) {
        if let Some((time, config)) = line.strip_prefix("  ").and_then(|line| line.split_once(' ')) {
            all.last_mut().unwrap().times.push((time.parse().unwrap(), config.to_owned()));
            continue;
        }
        let [format, y, m, n, k, kind] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let y = TYPES.into_iter().find(|of| of.name() == y).unwrap();
        let (y, shape) = (y, [m, n, k].map(|size: &str| size.parse().unwrap()));
        let kind = format!("{device} {kind}");
        all.push(Swept { caps, kind, format: format.to_owned(), y, shape, times: Vec::new() });
    }
    all
}

/// Scales in f32 were timed as GGUF's K types have them.
fn as_in_files(atom: Atom) -> Atom {
    let of_halves = Atom { bits: if atom.bits == 8 { 6 } else { 4 }, multiples: true, ..atom };
    if atom.scale == Float::F32 { of_halves } else { atom }
}

/// What is chosen beside the fastest configuration. Where that was not timed, as tiles could not stay whole then, it is what would be chosen among
/// those that were.
#[test]
fn choices_are_near_the_fastest_that_was_measured() {
    let mut shares: BTreeMap<String, Vec<(f64, String)>> = BTreeMap::new();
    for Swept { caps, kind, format, y, shape: [m, n, k], times } in sweeps() {
        let (shape, parsed) = ([m, n, k], parse(&format));
        let is_sync = kind.ends_with("sync");
        let timed = |chosen: &str| times.iter().find(|(_, config)| *config == chosen).map(|(time, _)| *time);
        let fastest = times.iter().map(|(time, _)| *time).fold(f64::INFINITY, f64::min);
        if parsed.act.is_quantized() {
            let problem = Problem { format: Some(parsed), x: Float::F16, y, m, n, k };
            let (atom, terms) = wna8_sm90::form(None, &problem).unwrap();
            let chosen = match is_sync {
                true => wna8_mma::config::config(as_in_files(atom), terms, shape, y, &caps).to_string(),
                false => wna8_sm90::config::config(&Form::codes(atom, terms, y), shape, &caps).to_string(),
            };
            let kind = if is_sync { format!("{kind}, quantised") } else { kind };
            let time = timed(&chosen).unwrap();
            let what = format!("{format} m={m} n={n} k={k}: {chosen}, {time} µs");
            shares.entry(kind).or_default().push((time / fastest, what));
            continue;
        }
        let atom = as_in_files(Atom::of_any(parsed.weight, k).unwrap());
        // x had the type of y where that is a half float.
        let x = if y == Float::F32 { atom.scale } else { y };
        let form = Form { x, ..Form::floats(atom, y) };
        let mut chosen = match is_sync {
            true => wna16_mma::config::config(atom, shape, y, &caps).to_string(),
            false => config::config(&form, shape, &caps).to_string(),
        };
        if timed(&chosen).is_none() {
            assert!(m > 32 && kind.starts_with("H100"), "{format} {m} {n} {k}: {chosen} was not timed");
            let mut others = config::expected(&form, shape, &caps);
            others.retain(|(config, _)| timed(&config.to_string()).is_some());
            chosen = others.iter().min_by(|one, other| one.1.total_cmp(&other.1)).unwrap().0.to_string();
        }
        let time = timed(&chosen).unwrap();
        let what = format!("{format} m={m} n={n} k={k}: {chosen}, {time} µs");
        shares.entry(kind).or_default().push((time / fastest, what));
    }
    let mut within = BTreeMap::new();
    for (kind, mut shares) in shares {
        shares.sort_by(|one, other| one.0.total_cmp(&other.0));
        let of = |most: f64| shares.partition_point(|(share, _)| *share <= most) as f64 / shares.len() as f64;
        let all = [of(1.05), of(1.1), of(1.2)];
        let mean = shares.iter().map(|(share, _)| share).sum::<f64>() / shares.len() as f64;
        println!("{kind}: {} products, at most 1.05, 1.1, 1.2: {all:.3?}; mean {mean:.3}", shares.len());
        shares.iter().rev().take(5).for_each(|(share, what)| println!("    {share:.2} {what}"));
        within.insert(kind, all);
    }
    let expected = [
        ("H100 random", [0.74, 0.88, 0.98]),
        ("H100 listed", [0.9, 0.99, 1.0]),
        ("H100 checked", [0.75, 0.88, 1.0]),
        ("H100 few", [0.7, 0.84, 0.98]),
        ("H200 random", [0.81, 0.9, 0.96]),
        ("H200 checked", [0.87, 0.89, 1.0]),
        ("H200 few", [0.82, 0.91, 0.98]),
        ("H200 few-checked", [0.85, 0.9, 0.94]),
        ("H200 K-types", [0.96, 0.96, 0.96]),
        ("H200 offsets", [1.0, 1.0, 1.0]),
        ("H200 offsets-checked", [0.93, 0.93, 0.93]),
        ("H200 a8 random", [0.8, 0.87, 0.97]),
        ("H200 sync", [0.81, 0.85, 0.92]),
        ("H200 sync, quantised", [0.78, 0.86, 0.95]),
    ];
    for (kind, least) in expected {
        let got = within[kind];
        assert!(got.iter().zip(least).all(|(got, least)| *got >= least), "{kind}: {got:?}, expected {least:?}");
    }
}

#[test]
fn plans_are_written_as_what_they_hold() {
    let format = Some(parse("w4a16-g128"));
    let problem = Problem { format, x: Float::F16, y: Float::F32, m: 1, n: 21504, k: 14336 };
    let text = Plans::new(Caps::H200, problem, "cuda_wna16").unwrap().to_string();
    let first = text.lines().next().unwrap();
    let want = "m 0 to 8: wna16_sm90 n8 2x2 mma late w8 x8/2 trigger 8 prefetch 4, ";
    assert!(first.starts_with(want), "{first}");
    assert!(text.lines().any(|line| line.starts_with("batch-invariant, m ")), "{text}");
}
