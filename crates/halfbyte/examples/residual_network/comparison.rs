//! The network three ways, on the same images.

use super::bytes::{ByteNetwork, Codes};
use super::calibration::calibrate;
use super::floats::{FloatNetwork, Images};
use super::network::Network;
use super::noise::expected;
use super::shapes::{SHAPES, draw};
use halfbyte::cpu::Cpu;
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

/// Runs all three.
pub fn compare(cpu: &Cpu, settings: &Settings<'_>) -> Result<Vec<Outcome>> {
    let &Settings { channels, size, fitted, calibrated, images, batch, time } = settings;
    let mut network = Network::random(channels, SHAPES.len(), 1);
    let (pixels, classes) = draw(fitted, size, 2);
    let mut untrained = FloatNetwork::new(cpu, &network, None)?;
    let features = network.features(&mut untrained, &Images::of_bytes(&pixels, fitted, size))?;
    network.fit_head(&features.values, &classes);

    let mut dense = FloatNetwork::new(cpu, &network, None)?;
    let calibration = Images::of_bytes(&pixels[..calibrated * size * size * 3], calibrated, size);
    let seen = calibrate(&network, &mut dense, &calibration)?;
    let format: Format = "w4a16-g32".parse()?;
    let mut four_bits = FloatNetwork::new(cpu, &network, Some(format))?;
    let mut bytes = ByteNetwork::new(cpu, &network, &seen)?;

    let (pixels, drawn) = draw(images, size, 3);
    let parts = || pixels.chunks(batch * size * size * 3).map(|part| (part, part.len() / (size * size * 3)));
    let floats: Vec<Images> = parts().map(|(part, batch)| Images::of_bytes(part, batch, size)).collect();
    let codes: Vec<Codes> = parts().map(|(part, batch)| bytes.images(part, batch, size)).collect();
    let (exact, seconds) = timed(time, &floats, |x| Ok(network.run(&mut dense, x)?.values))?;
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
    let (y, seconds) = timed(time, &floats, |x| Ok(network.run(&mut four_bits, x)?.values))?;
    outcomes.push(judge("w4a16-g32", four_bits.bytes(), &y, seconds, Some(noise)));
    let noise = expected(&network, &seen, &bytes.changes, &bytes.scales)?;
    let (y, seconds) = timed(time, &codes, |x| Ok(network.run(&mut bytes, x)?.floats))?;
    outcomes.push(judge("int8", bytes.bytes(), &y, seconds, Some(noise)));
    Ok(outcomes)
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
