//! What the network's values look like on a few images: their ranges, from which bytes get their scales.

use super::floats::{FloatNetwork, Images};
use super::network::{Arithmetic, Network};
use halfbyte::Result;
use halfbyte::cpu::Cpu;

/// What was seen of the result of one operation.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    pub least: f32,
    pub greatest: f32,
    pub mean_square: f64,
    /// Share of values above 0.
    pub positive: f64,
}

impl Seen {
    fn of(x: &Images<Cpu>) -> Self {
        let (values, len) = (&x.values, x.values.len() as f64);
        Self {
            least: values.iter().copied().fold(f32::INFINITY, f32::min),
            greatest: values.iter().copied().fold(f32::NEG_INFINITY, f32::max),
            mean_square: values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / len,
            positive: values.iter().filter(|&&v| v > 0.0).count() as f64 / len,
        }
    }
}

/// The network in floats, looked at after every operation.
struct Watched<'a, 'b> {
    floats: &'a mut FloatNetwork<'b, Cpu>,
    seen: Vec<Seen>,
}

impl Watched<'_, '_> {
    fn saw(&mut self, y: Images<Cpu>) -> Images<Cpu> {
        self.seen.push(Seen::of(&y));
        y
    }
}

impl Arithmetic for Watched<'_, '_> {
    type Tensor = Images<Cpu>;

    fn conv(&mut self, layer: usize, x: &Images<Cpu>) -> Result<Images<Cpu>> {
        let y = self.floats.conv(layer, x)?;
        Ok(self.saw(y))
    }

    fn add(&mut self, a: &Images<Cpu>, b: &Images<Cpu>) -> Result<Images<Cpu>> {
        let y = self.floats.add(a, b)?;
        Ok(self.saw(y))
    }

    fn pool(&mut self, x: &Images<Cpu>) -> Result<Images<Cpu>> {
        let y = self.floats.pool(x)?;
        Ok(self.saw(y))
    }

    fn head(&mut self, x: &Images<Cpu>) -> Result<Images<Cpu>> {
        let y = self.floats.head(x)?;
        Ok(self.saw(y))
    }
}

/// What is seen of the images, and then of the result of every operation in its order.
pub fn calibrate(network: &Network, floats: &mut FloatNetwork<'_, Cpu>, x: &Images<Cpu>) -> Result<Vec<Seen>> {
    let mut watched = Watched { floats, seen: vec![Seen::of(x)] };
    network.run(&mut watched, x)?;
    Ok(watched.seen)
}
