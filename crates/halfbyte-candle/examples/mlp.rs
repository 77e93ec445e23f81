//! A gated MLP of candle's tensors with dense weights, and with the same in 4 bits: how much smaller, and how far off.
//!
//! `cargo run --release --example mlp`, with `--features cuda` on a GPU.

use candle_core::{DType, Device, Module, Result, Tensor};
use halfbyte_candle::QLinear;

const HIDDEN: usize = 512;
const INNER: usize = 1408;

/// `down(silu(gate(x)) · up(x))`.
fn mlp(x: &Tensor, [gate, up, down]: [&dyn Module; 3]) -> Result<Tensor> {
    let gate = gate.forward(x)?;
    let gate = (&gate / ((gate.neg()?.exp()? + 1.0)?))?;
    down.forward(&(gate * up.forward(x)?)?)
}

/// candle's own product, to compare with.
struct Dense(Tensor);

impl Module for Dense {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.broadcast_matmul(&self.0.t()?)
    }
}

fn main() -> Result<()> {
    let device = Device::cuda_if_available(0)?;
    let weight = |n: usize, k: usize| Tensor::randn(0f32, (1.0 / k as f64).sqrt() as f32, (n, k), &device);
    let dense = [weight(INNER, HIDDEN)?, weight(INNER, HIDDEN)?, weight(HIDDEN, INNER)?].map(Dense);
    let x = Tensor::randn(0f32, 1.0, (2, 16, HIDDEN), &device)?;
    let want = mlp(&x, [&dense[0], &dense[1], &dense[2]])?;
    println!("{:?}, x {:?}", device.location(), x.dims());
    for format in ["w8a16-g128", "w4a16-g128", "w4a16-g32-asym"] {
        let quantize = |dense: &Dense| QLinear::quantize(&dense.0, None, format);
        let layers = [quantize(&dense[0])?, quantize(&dense[1])?, quantize(&dense[2])?];
        let y = mlp(&x, [&layers[0], &layers[1], &layers[2]])?;
        let square = |t: &Tensor| t.to_dtype(DType::F32)?.sqr()?.sum_all()?.to_scalar::<f32>();
        let off = (square(&(y - &want)?)? / square(&want)?).sqrt();
        let bytes: usize = layers.iter().map(QLinear::bytes).sum();
        println!(
            "{format:>16}: {:.2} MB instead of {:.2}, off by {:.2} %",
            bytes as f64 / 1e6,
            12e-6 * (HIDDEN * INNER) as f64,
            off * 100.0
        );
    }
    Ok(())
}
