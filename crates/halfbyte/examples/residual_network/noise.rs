//! What error is to be expected at the end, from what rounding has done to weights and values.
//!
//! Rounding errors are taken for noise: as good as independent of each other and of what they meet. Then powers (mean squares)
//! add up, with S the power of the signal that calibration has seen, N that of the noise, and W the weights `[co, k]`:
//!
//! ```text
//! weights:   N(y) = N(x) · k · mean(W²) + S(x) · k · mean(ΔW²)
//! relu:      N · share of values above 0
//! sum:       N(a) + N(b)
//! mean:      N at most, since the square of a mean is at most the mean of the squares
//! rounding:  N + step² / 12
//! ```

use super::calibration::Seen;
use super::network::{Arithmetic, Layer, Network};
use halfbyte::Result;

/// Powers of what lies between two operations.
#[derive(Clone, Copy)]
struct Power {
    signal: f64,
    noise: f64,
}

struct Noise<'a> {
    network: &'a Network,
    /// What calibration has seen, and what one step of the codes stands for, from the result of the next operation on.
    results: Box<dyn Iterator<Item = (&'a Seen, f32)> + 'a>,
    changes: std::slice::Iter<'a, Vec<f64>>,
}

impl Noise<'_> {
    fn product(&mut self, layer: &Layer, x: Power) -> Power {
        let change = self.changes.next().expect("every layer has been quantised");
        let rows = layer.geometry.co as f64;
        let gain = layer.weights.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>() / rows;
        let added = change.iter().map(|d| d.powi(2)).sum::<f64>() / rows;
        self.result(x.noise * gain + x.signal * added, layer.relu)
    }

    fn result(&mut self, noise: f64, relu: bool) -> Power {
        let (seen, step) = self.results.next().expect("calibration has seen every result");
        let passed = if relu { seen.positive } else { 1.0 };
        Power { signal: seen.mean_square, noise: noise * passed + f64::from(step).powi(2) / 12.0 }
    }
}

impl Arithmetic for Noise<'_> {
    type Tensor = Power;

    fn conv(&mut self, layer: usize, x: &Power) -> Result<Power> {
        let network = self.network;
        Ok(self.product(&network.layers[layer], *x))
    }

    fn add(&mut self, a: &Power, b: &Power) -> Result<Power> {
        Ok(self.result(a.noise + b.noise, true))
    }

    fn pool(&mut self, x: &Power) -> Result<Power> {
        Ok(self.result(x.noise, false))
    }

    fn head(&mut self, x: &Power) -> Result<Power> {
        let network = self.network;
        Ok(self.product(&network.head, *x))
    }
}

/// The root mean square of the error that is to be expected of the classes.
///
/// `changes` are those of the weights of each layer, the head last; `scales` what one step of the codes stands for, of the
/// images and of every result, 0 where it is floats.
pub fn expected(network: &Network, seen: &[Seen], changes: &[Vec<f64>], scales: &[f32]) -> Result<f64> {
    let mut results = seen.iter().zip(scales.iter().copied());
    let (images, _) = results.next().expect("calibration has seen the images");
    let mut noise = Noise { network, results: Box::new(results), changes: changes.iter() };
    let classes = network.run(&mut noise, &Power { signal: images.mean_square, noise: 0.0 })?;
    Ok(classes.noise.sqrt())
}
