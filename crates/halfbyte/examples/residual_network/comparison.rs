//! The network three ways, on the same images, and on a GPU beside.

use super::bytes::{ByteNetwork, Quantised};
use super::calibration::{Seen, calibrate};
use super::checked::{CheckedBytes, CheckedFloats};
use super::floats::{FloatNetwork, Images};
use super::gpu::Gpu;
use super::machine::Machine;
use super::network::Network;
use super::noise::expected;
use super::shapes::{SHAPES, draw};
use halfbyte::cpu::Cpu;
use halfbyte::cuda::Cuda;
use halfbyte::{Format, Result};
use std::time::{Duration, Instant};

/// What is compared.
pub struct Settings<'a> {
    /// Channels of each block.
    pub channels: &'a [usize],
    /// Rows and columns of an image.
    pub size: usize,
    /// Images that the head is fitted to.
    pub fitted: usize,
    /// Images of them that ranges are taken from.
    pub calibrated: usize,
    /// Other images, which are compared.
    pub images: usize,
    /// How many of them are computed at a time.
    pub batch: usize,
    /// How long each way is timed.
    pub time: Duration,
}

/// What one way came to.
pub struct Outcome {
    pub name: &'static str,
    pub weight_bytes: usize,
    /// Least of several runs over all images together.
    pub seconds: f64,
    /// Images whose greatest class is the shape that was drawn.
    pub right: usize,
    /// Images whose greatest class is that of f32.
    pub same: usize,
    /// Against f32: root mean square, what was expected of it, and the greatest.
    pub errors: Option<[f64; 3]>,
    /// Root mean square of the classes.
    pub signal: f64,
}

/// The network with what calibration has seen of it, and the format of its 4-bit weights.
pub struct Trained {
    pub network: Network,
    pub seen: Vec<Seen>,
    pub format: Format,
}

/// Fits the head to some images, and looks at the values of a few of them.
pub fn train(cpu: &Cpu, settings: &Settings<'_>) -> Result<Trained> {
    let &Settings { channels, size, fitted, calibrated, .. } = settings;
    let mut network = Network::random(channels, SHAPES.len(), 1);
    let (pixels, classes) = draw(fitted, size, 2);
    let mut untrained = FloatNetwork::new(cpu, &network, None)?;
    let features = network.features(&mut untrained, &Images::of_bytes(cpu, &pixels, fitted, size)?)?;
    network.fit_head(&features.values, &classes);

    let mut dense = FloatNetwork::new(cpu, &network, None)?;
    let calibration = Images::of_bytes(cpu, &pixels[..calibrated * size * size * 3], calibrated, size)?;
    let seen = calibrate(&network, &mut dense, &calibration)?;
    Ok(Trained { network, seen, format: "w4a16-g32".parse()? })
}

/// Runs all three on the CPU, and where there is a GPU the last two on it too.
pub fn compare(cpu: &Cpu, settings: &Settings<'_>, gpu: Option<&Cuda>) -> Result<Vec<Outcome>> {
    let &Settings { size, images, batch, time, .. } = settings;
    let Trained { network, seen, format } = train(cpu, settings)?;
    let mut dense = FloatNetwork::new(cpu, &network, None)?;
    let mut four_bits = FloatNetwork::new(cpu, &network, Some(format))?;
    let quantised = Quantised::new(&network, &seen)?;
    let mut bytes = ByteNetwork::new(cpu, &quantised)?;

    let (pixels, drawn) = draw(images, size, 3);
    let parts: Vec<(&[u8], usize)> =
        pixels.chunks(batch * size * size * 3).map(|part| (part, part.len() / (size * size * 3))).collect();
    let (exact, seconds) = timed(time, &parts, |part| classes(&network, &mut dense, part, size))?;
    let judge = |name, weight_bytes, y: &[f32], seconds, noise: Option<f64>| {
        let (top, best) = (top(y), top(&exact));
        let count = |wanted: &[usize]| top.iter().zip(wanted).filter(|(a, b)| a == b).count();
        let off = || y.iter().zip(&exact).map(|(y, exact)| f64::from(y - exact));
        let greatest = off().fold(0.0f64, |most, e| most.max(e.abs()));
        let errors = noise.map(|noise| [root_mean_square(off()), noise, greatest]);
        let signal = root_mean_square(exact.iter().map(|&v| v.into()));
        Outcome { name, weight_bytes, seconds, right: count(&drawn), same: count(&best), errors, signal }
    };
    let mut outcomes = vec![judge("f32", dense.bytes(), &exact, seconds, None)];
    let noise = expected(&network, &seen, &four_bits.changes, &vec![0.0; seen.len()])?;
    let (y, seconds) = timed(time, &parts, |part| classes(&network, &mut four_bits, part, size))?;
    outcomes.push(judge("w4a16-g32", four_bits.bytes(), &y, seconds, Some(noise)));
    let noise = expected(&network, &seen, &quantised.changes, &quantised.scales)?;
    let (y, seconds) = timed(time, &parts, |part| classes_of_bytes(&network, &mut bytes, part, size))?;
    outcomes.push(judge("int8", bytes.bytes(), &y, seconds, Some(noise)));
    if let Some(gpu) = gpu {
        let machine = Gpu::new(gpu.clone());
        let mut there = FloatNetwork::new(&machine, &network, Some(format))?;
        let (y, seconds) = timed(time, &parts, |part| classes(&network, &mut there, part, size))?;
        let expected = outcomes[1].errors.map(|[_, expected, _]| expected);
        outcomes.push(judge("w4a16-g32 on the GPU", there.bytes(), &y, seconds, expected));
        let mut there = ByteNetwork::new(&machine, &quantised)?;
        let (y, seconds) = timed(time, &parts, |part| classes_of_bytes(&network, &mut there, part, size))?;
        outcomes.push(judge("int8 on the GPU", there.bytes(), &y, seconds, Some(noise)));
    }
    Ok(outcomes)
}

/// From pixels to classes on the host.
fn classes<M: Machine>(
    network: &Network,
    floats: &mut FloatNetwork<'_, M>,
    &(pixels, batch): &(&[u8], usize),
    size: usize,
) -> Result<Vec<f32>> {
    let machine = floats.machine;
    let x = Images::of_bytes(machine, pixels, batch, size)?;
    machine.download(&network.run(floats, &x)?.values)
}

/// The same in bytes.
fn classes_of_bytes<M: Machine>(
    network: &Network,
    bytes: &mut ByteNetwork<'_, M>,
    &(pixels, batch): &(&[u8], usize),
    size: usize,
) -> Result<Vec<f32>> {
    let x = bytes.images(pixels, batch, size)?;
    let y = network.run(bytes, &x)?;
    bytes.machine.download(y.classes())
}

/// What comparing every operation on a GPU with the CPU's came to.
pub struct Agreement {
    /// Codes and classes in bytes that were compared, and those with other bits.
    pub compared: usize,
    pub different: usize,
    /// With 4-bit weights: the greatest difference of a product in parts of both bounds, and sums and means that are not the
    /// nearest halves.
    pub worst: f64,
    pub not_nearest: usize,
}

/// Compares every operation on a GPU with the same one on the CPU.
pub fn agreement(cpu: &Cpu, settings: &Settings<'_>, gpu: &Cuda) -> Result<Agreement> {
    let &Settings { size, batch, .. } = settings;
    let Trained { network, seen, format } = train(cpu, settings)?;
    let (pixels, _) = draw(batch, size, 4);
    let machine = Gpu::new(gpu.clone());
    let quantised = Quantised::new(&network, &seen)?;
    let (mut there, mut here) = (ByteNetwork::new(&machine, &quantised)?, ByteNetwork::new(cpu, &quantised)?);
    let images = (there.images(&pixels, batch, size)?, here.images(&pixels, batch, size)?);
    let mut bytes = CheckedBytes { gpu: &mut there, cpu: &mut here, compared: 0, different: 0 };
    network.run(&mut bytes, &images)?;
    let mut there = FloatNetwork::new(&machine, &network, Some(format))?;
    let images = Images::of_bytes(&machine, &pixels, batch, size)?;
    let mut floats = CheckedFloats::new(cpu, &network, format, &mut there)?;
    network.run(&mut floats, &images)?;
    let (compared, different) = (bytes.compared, bytes.different);
    Ok(Agreement { compared, different, worst: floats.worst, not_nearest: floats.different })
}

fn root_mean_square(values: impl Iterator<Item = f64>) -> f64 {
    let (mut sum, mut count) = (0.0, 0);
    values.for_each(|v| {
        sum += v * v;
        count += 1;
    });
    (sum / f64::from(count)).sqrt()
}

/// The greatest class of each image.
fn top(y: &[f32]) -> Vec<usize> {
    let greatest = |row: &[f32]| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap_or(0);
    y.chunks_exact(SHAPES.len()).map(greatest).collect()
}

/// The results of `work` on all parts, one behind the other, and the least time of several runs.
fn timed<T>(time: Duration, parts: &[T], mut work: impl FnMut(&T) -> Result<Vec<f32>>) -> Result<(Vec<f32>, f64)> {
    let (begun, mut least) = (Instant::now(), f64::INFINITY);
    loop {
        let start = Instant::now();
        let y = parts.iter().map(&mut work).collect::<Result<Vec<_>>>()?;
        least = least.min(start.elapsed().as_secs_f64());
        if begun.elapsed() >= time {
            return Ok((y.concat(), least));
        }
    }
}
