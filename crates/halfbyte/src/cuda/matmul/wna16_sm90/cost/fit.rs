//! Fits the numbers of the model to times of products in `tests/it/cuda/sweeps`, and prints them; what is chosen with them, and how near that
//! is to the fastest, the test `choices_are_near_the_fastest_that_was_measured` says.
//!
//! ```text
//! cargo test -p halfbyte --lib numbers_are_fitted -- --ignored --nocapture
//! ```

use super::super::candidates::candidates;
use super::super::config::{Config, LEAST_APART};
use super::{Machine, Timed, Work, few_rows, many_rows};
use crate::cuda::Caps;
use crate::cuda::tiled::Form;
use crate::format::Format;
use crate::layout::cuda_wna16::Atom;
use crate::tensor::Float;

const SWEEPS: [(&str, Caps); 2] = [
    (
        include_str!("../../../../../tests/it/cuda/sweeps/nvidia-h100.txt"),
        Caps { memory_mb_per_s: 3_352_320, l2_bytes: 50 << 20, ..Caps::H200 },
    ),
    (include_str!("../../../../../tests/it/cuda/sweeps/nvidia-h200.txt"), Caps::H200),
];

/// What a configuration took for a product.
struct Time {
    config: Config,
    form: Form,
    shape: [usize; 3],
    caps: Caps,
    microseconds: f64,
    /// The more the nearer it is to the fastest of the product, since among those the choice must tell.
    weight: f64,
}

impl Time {
    /// The square of the logarithm of what is expected over what was measured, or twice the distance where it is far off.
    fn loss(&self, expected: f64) -> f64 {
        const FAR: f64 = 0.1;
        let off = (expected / self.microseconds).ln().abs();
        self.weight * if off < FAR { off * off } else { FAR * (2.0 * off - FAR) }
    }
}

/// Times of what a number is fitted to.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Of {
    /// Tiles of few tokens, or of more, of weights with half scales and without offsets.
    Few,
    Many,
    /// Tiles of more tokens, of weights with half scales and with offsets.
    Offsets,
}

impl Of {
    fn contains(self, config: Config, atom: Atom) -> bool {
        let few = config.tokens < LEAST_APART;
        match self {
            Self::Few => few && !atom.is_wide(),
            Self::Many => !few && !atom.is_wide(),
            Self::Offsets => !few && atom.offset && atom.scale != Float::F32,
        }
    }
}

fn times(of: Of) -> Vec<Time> {
    let mut all = Vec::new();
    for (text, caps) in SWEEPS {
        let mut lines = text.lines().peekable();
        while let Some(product) = lines.next() {
            let [format, y, m, n, k, _] = product.split(' ').collect::<Vec<_>>().try_into().unwrap();
            let [m, n, k] = [m, n, k].map(|size: &str| size.parse().unwrap());
            let y = [Float::F32, Float::F16, Float::BF16].into_iter().find(|of| of.name() == y).unwrap();
            let form = Form::floats(Atom::of_any(format.parse::<Format>().unwrap().weight, k).unwrap(), y);
            let known: Vec<(String, Config)> =
                candidates(&form, m, &caps).into_iter().map(|config| (config.to_string(), config)).collect();
            let first = all.len();
            while let Some(line) = lines.next_if(|line| line.starts_with("  ")) {
                let (time, name) = line.trim().split_once(' ').unwrap();
                let Some((_, config)) = known.iter().find(|(of, _)| of == name) else { continue };
                if !of.contains(*config, form.atom) {
                    continue;
                }
                let microseconds = time.parse().unwrap();
                all.push(Time { config: *config, form, shape: [m, n, k], caps, microseconds, weight: 0.0 });
            }
            let fastest = all[first..].iter().map(|time| time.microseconds).fold(f64::INFINITY, f64::min);
            for time in &mut all[first..] {
                time.weight = (1.0 + 10.0 * (time.microseconds / fastest - 1.0)).recip();
            }
        }
    }
    all
}

/// Each of some numbers goes up and down by ever smaller shares, while that lowers the loss.
fn fitted<N: Clone>(mut numbers: N, each: impl Fn(&mut N) -> Vec<&mut f64>, loss: impl Fn(&N) -> f64) -> N {
    let mut least = loss(&numbers);
    println!("loss {least:.2}");
    for step in [1.2, 1.05, 1.01_f64] {
        loop {
            let before = least;
            for i in 0..each(&mut numbers).len() {
                for factor in [step, step.recip()] {
                    let mut other = numbers.clone();
                    *each(&mut other)[i] *= factor;
                    let of_other = loss(&other);
                    if of_other < least {
                        (numbers, least) = (other, of_other);
                    }
                }
            }
            if before - least < 1e-3 * before {
                break;
            }
        }
        println!("loss {least:.2} with steps of {step}");
    }
    numbers
}

fn each_of_few(numbers: &mut few_rows::Numbers) -> Vec<&mut f64> {
    let few_rows::Numbers {
        wgmma,
        sync,
        sync_bytes,
        zeros,
        wide: _,
        wait,
        sets_wait,
        sync_begins,
        latency,
        port,
        bandwidth,
        slowest,
        join,
        cut,
        hides,
        write,
        no_room,
        room,
        crowded,
    } = numbers;
    let single = [sync_bytes, zeros, sets_wait, sync_begins, latency, port, bandwidth, slowest, hides, write, no_room];
    wgmma.iter_mut().chain(sync).chain(wait).chain(join).chain(cut).chain(single).chain([room, crowded]).collect()
}

fn each_of_many(numbers: &mut many_rows::Numbers) -> Vec<&mut f64> {
    let many_rows::Numbers {
        wgmma,
        convert,
        scale_weights,
        compute_weights: _,
        scale_sums,
        offset_sums: _,
        zeros,
        beside,
        wait,
        latency,
        port,
        slowest,
        join,
        cut,
        hides,
        write,
        starts: _,
        no_room,
        room,
    } = numbers;
    let single = [wgmma, convert, scale_weights, zeros, beside, latency, port, slowest, hides, write, no_room, room];
    scale_sums.iter_mut().chain(wait).chain(join).chain(cut).chain(single).collect()
}

fn each_of_offsets(numbers: &mut many_rows::Numbers) -> Vec<&mut f64> {
    numbers.offset_sums.iter_mut().chain(&mut numbers.compute_weights).collect()
}

/// Of all times, by a model: clocks of a unit, and microseconds.
fn loss(
    times: &[Time],
    clocks: impl Fn(Config, &Form) -> [f64; 2],
    microseconds: impl Fn(&Timed, &Work, [usize; 3], &Machine) -> f64,
) -> f64 {
    let of = |time: &Time| {
        let &Time { config, form, shape, ref caps, .. } = time;
        let timed = Timed { config, atom: form.atom, clocks: clocks(config, &form) };
        let work = Work::of(config, shape, caps.multiprocessors as usize);
        time.loss(microseconds(&timed, &work, shape, &Machine::of(caps)))
    };
    times.iter().map(of).sum()
}

fn loss_of_few(times: &[Time], numbers: &few_rows::Numbers) -> f64 {
    let clocks = |config, form: &Form| few_rows::clocks(numbers, config, form.atom);
    loss(times, clocks, |timed, work, shape, machine| few_rows::microseconds(numbers, timed, work, shape, machine))
}

fn loss_of_many(times: &[Time], numbers: &many_rows::Numbers) -> f64 {
    let clocks = |config, form: &Form| many_rows::clocks(numbers, config, form);
    loss(times, clocks, |timed, work, shape, machine| many_rows::microseconds(numbers, timed, work, shape, machine))
}

#[test]
#[ignore = "prints numbers; run with: cargo test -p halfbyte --lib numbers_are_fitted -- --ignored --nocapture"]
fn numbers_are_fitted() {
    let few = times(Of::Few);
    println!("{} times of tiles of few tokens", few.len());
    println!("{:#?}", fitted(few_rows::HOPPER, each_of_few, |numbers| loss_of_few(&few, numbers)));
    let many = times(Of::Many);
    println!("{} times of tiles of many", many.len());
    println!("{:#?}", fitted(many_rows::HOPPER, each_of_many, |numbers| loss_of_many(&many, numbers)));
    let offsets = times(Of::Offsets);
    println!("{} times of weights with offsets", offsets.len());
    println!("{:#?}", fitted(many_rows::HOPPER, each_of_offsets, |numbers| loss_of_many(&offsets, numbers)));
}

#[test]
fn the_model_expects_what_was_measured() {
    for (of, most) in [(Of::Few, 0.12), (Of::Many, 0.12), (Of::Offsets, 0.12)] {
        let times = times(of);
        let loss = match of {
            Of::Few => loss_of_few(&times, &few_rows::HOPPER),
            Of::Many | Of::Offsets => loss_of_many(&times, &many_rows::HOPPER),
        };
        let off = (loss / times.iter().map(|time| time.weight).sum::<f64>()).sqrt();
        println!("{of:?}: {} times, off by {off:.3}", times.len());
        assert!(times.len() > 1000 && off < most, "{off}");
    }
}
