//! A small residual network of basic blocks (He et al., "Deep residual learning for image recognition", 2015), and what an
//! arithmetic needs to run it.
//!
//! ```text
//! stem:    x = relu(3×3)
//! block:   x = relu(3×3(relu(3×3(x))) + shortcut(x))     the shortcut is x itself; where the size halves, 1×1 with stride 2
//! head:    classes = linear(mean over pixels of x)
//! ```
//!
//! Convolutions are random but fixed, of the deviation that keeps the signal's power through a relu; as random features they
//! tell shapes apart well enough for the head to be fitted to a few of them. Normalisation would be folded into the weights, as
//! it always can be, so there is none.

use super::random::Random;
use halfbyte::Result;
use halfbyte::conv::Geometry;

/// A convolution, or the head, as training would leave it.
#[derive(Clone)]
pub struct Layer {
    pub geometry: Geometry,
    /// `[co, k]`, in the order that [`halfbyte::conv`] wants.
    pub weights: Vec<f32>,
    /// `[co]`.
    pub bias: Vec<f32>,
    /// Whether a relu follows.
    pub relu: bool,
}

/// Numbers of the layers of a block.
#[derive(Clone)]
pub struct Block {
    first: usize,
    second: usize,
    shortcut: Option<usize>,
}

/// Layers, the first of them the stem, and how they hang together.
#[derive(Clone)]
pub struct Network {
    pub layers: Vec<Layer>,
    blocks: Vec<Block>,
    /// A product: a kernel of 1×1 on one pixel.
    pub head: Layer,
}

/// How the operations of a network are computed. They come in the same order whenever the network runs.
pub trait Arithmetic {
    /// What lies between two operations.
    type Tensor;
    /// A convolution with its bias and relu.
    fn conv(&mut self, layer: usize, x: &Self::Tensor) -> Result<Self::Tensor>;
    /// The relu of a sum.
    fn add(&mut self, a: &Self::Tensor, b: &Self::Tensor) -> Result<Self::Tensor>;
    /// The mean over all pixels.
    fn pool(&mut self, x: &Self::Tensor) -> Result<Self::Tensor>;
    /// The last product with its bias.
    fn head(&mut self, x: &Self::Tensor) -> Result<Self::Tensor>;
}

impl Network {
    /// Random convolutions for images of 3 channels; a block for each number of channels, which halves rows and columns where
    /// it has more of them than the one before. The head gives zeros.
    pub fn random(channels: &[usize], classes: usize, seed: u64) -> Self {
        let mut random = Random(seed);
        let mut layers = Vec::new();
        let mut layer = |geometry: Geometry, relu: bool| {
            let k = geometry.k();
            let weights = (0..geometry.co * k).map(|_| random.normal() * (2.0 / k as f32).sqrt()).collect();
            let bias = (0..geometry.co).map(|_| 0.1 * random.normal()).collect();
            layers.push(Layer { geometry, weights, bias, relu });
            layers.len() - 1
        };
        let three = |ci, co| Geometry { padding: [1; 4], ..Geometry::new(ci, co, [3, 3]) };
        layer(three(3, channels[0]), true);
        let mut blocks = Vec::new();
        for (&co, &ci) in channels.iter().zip([channels[0]].iter().chain(channels)) {
            let stride = if co > ci { [2, 2] } else { [1, 1] };
            blocks.push(Block {
                first: layer(Geometry { stride, ..three(ci, co) }, true),
                second: layer(three(co, co), false),
                shortcut: (co > ci).then(|| layer(Geometry { stride, ..Geometry::new(ci, co, [1, 1]) }, false)),
            });
        }
        let geometry = Geometry::new(channels[channels.len() - 1], classes, [1, 1]);
        let head = Layer { geometry, weights: vec![0.0; classes * geometry.ci], bias: vec![0.0; classes], relu: false };
        Self { layers, blocks, head }
    }

    /// What the head sees of x.
    pub fn features<A: Arithmetic>(&self, arithmetic: &mut A, x: &A::Tensor) -> Result<A::Tensor> {
        let mut x = arithmetic.conv(0, x)?;
        for block in &self.blocks {
            let y = arithmetic.conv(block.first, &x)?;
            let y = arithmetic.conv(block.second, &y)?;
            x = match block.shortcut {
                Some(shortcut) => {
                    let same = arithmetic.conv(shortcut, &x)?;
                    arithmetic.add(&y, &same)?
                }
                None => arithmetic.add(&y, &x)?,
            };
        }
        arithmetic.pool(&x)
    }

    /// The classes of x.
    pub fn run<A: Arithmetic>(&self, arithmetic: &mut A, x: &A::Tensor) -> Result<A::Tensor> {
        let features = self.features(arithmetic, x)?;
        arithmetic.head(&features)
    }

    /// Fits the head to features `[image, channel]` of images of known classes: the class whose mean is nearest, each channel
    /// measured by its variance within the classes.
    pub fn fit_head(&mut self, features: &[f32], classes: &[usize]) {
        let Geometry { ci: channels, co: count, .. } = self.head.geometry;
        let rows = || features.chunks_exact(channels).zip(classes);
        let mut means = vec![vec![0.0f64; channels]; count];
        for (row, &class) in rows() {
            let members = classes.iter().filter(|&&c| c == class).count() as f64;
            means[class].iter_mut().zip(row).for_each(|(mean, &v)| *mean += f64::from(v) / members);
        }
        let mut variances = vec![0.0f64; channels];
        for (row, &class) in rows() {
            for (c, variance) in variances.iter_mut().enumerate() {
                *variance += (f64::from(row[c]) - means[class][c]).powi(2) / classes.len() as f64;
            }
        }
        // Channels that hardly vary would otherwise rule.
        let least = variances.iter().sum::<f64>() / channels as f64;
        variances.iter_mut().for_each(|variance| *variance += least);
        let middle = |c: usize| means.iter().map(|mean| mean[c]).sum::<f64>() / count as f64;
        for (class, mean) in means.iter().enumerate() {
            let mut bias = 0.0;
            for c in 0..channels {
                self.head.weights[class * channels + c] = ((mean[c] - middle(c)) / variances[c]) as f32;
                bias -= (mean[c].powi(2) - middle(c).powi(2)) / variances[c] / 2.0;
            }
            self.head.bias[class] = bias as f32;
        }
    }
}
