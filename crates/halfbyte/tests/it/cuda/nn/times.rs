//! How long a step's kernels take on the device, one behind the other as in a recorded step: by hand, on a device that does
//! nothing else.

use super::Bench;
use crate::cuda::gpus;
use half::f16;
use halfbyte::cuda::driver::Stream;
use halfbyte::cuda::nn::{self, Dense, DenseCall, Draw, FloatBuffer, Norm, Step};
use halfbyte::{Float, Floats, Result};

/// Kernels of a recording.
const TIMES: usize = 20;

/// Bytes a second that an H200 reads at most, as measured.
const H200: f64 = 4.35e12;

impl Bench<'_> {
    /// Microseconds of one of many in a row.
    fn microseconds(&self, what: &str, mut work: impl FnMut(&Stream) -> Result<()>) -> f64 {
        let all = |stream: &Stream| (0..TIMES).try_for_each(|_| work(stream));
        let mut seconds = self.stream.time_replays(3, 9, all).unwrap();
        seconds.sort_by(f64::total_cmp);
        let microseconds = seconds[seconds.len() / 2] / TIMES as f64 * 1e6;
        println!("{what}: {microseconds:.2} µs");
        microseconds
    }
}

/// Llama-3-8B's sizes. The limits are twice what is aimed at, and those of an H200.
#[test]
#[ignore = "measures; run with: cargo test --release --test it -- --ignored --nocapture kernels_of_a_step"]
fn kernels_of_a_step_take_little_time() {
    for gpu in gpus() {
        let (bench, mut over) = (Bench::new(&gpu), Vec::new());
        let [vocab, hidden, inner] = [128_256, 4096, 14_336];
        let mut held = |what: &str, microseconds: f64, most: f64| {
            if microseconds > most {
                over.push(format!("{what}: {microseconds:.2} µs, at most {most:.2}"));
            }
        };
        let w = vec![f16::from_f32(0.01); vocab * hidden];
        let head = Dense::new(&gpu, &bench.stream, Floats::F16(&w), [vocab, hidden]).unwrap();
        drop(w);
        let x = bench.floats(&vec![0.5; 512 * hidden], Float::F16);
        let mut y = FloatBuffer::allocate(&gpu, Float::F32, 512 * vocab).unwrap();
        for m in [1, 2, 8, 16, 512] {
            let what = format!("{} of {m}", head.kernel(&gpu, m, Float::F16));
            let microseconds = bench.microseconds(&what, |stream| {
                let call = DenseCall { x: x.view(0..m * hidden), m, bias: None, y: y.view_mut(0..m * vocab) };
                head.forward(&gpu, stream, call)
            });
            let of_memory = head.bytes() as f64 / H200 * 1e6;
            println!("    {:.0} % of the bandwidth", of_memory / microseconds * 100.0);
            if m <= 16 {
                held(&what, microseconds, of_memory / 0.8);
            }
        }

        let logits: Vec<f32> = (0..vocab).map(|i| (i * 7919 % 10_007) as f32 * 1e-3).collect();
        let logits = bench.upload(&logits);
        let [mut choice, mut drawn] = [bench.upload(&[0u32; 2]), bench.upload(&[0u32; 2])];
        let [mut token, mut position] = [bench.upload(&[0u32]), bench.upload(&[0u32])];
        let argmax = bench.microseconds("argmax", |stream| {
            let (choice, token, position) = (choice.view_mut(), token.view_mut(), position.view_mut());
            nn::argmax(&gpu, stream, Step { logits: logits.view(), choice, token, position, advance: 1 })
        });
        held("argmax", argmax, 6.0);
        bench.microseconds("sample, 40 likeliest, top-p 0.9", |stream| {
            let (logits, choice, drawn, token) = (logits.view(), choice.view(), drawn.view_mut(), token.view_mut());
            let [temperature, top_p] = [0.8, 0.9];
            nn::sample(&gpu, stream, Draw { logits, choice, drawn, token, temperature, top_k: 40, top_p, random: 0.4 })
        });

        let (mut residual, update) =
            (bench.upload(&vec![0.5f32; 512 * hidden]), bench.upload(&vec![0f32; 512 * hidden]));
        let weight = bench.upload(&vec![1f32; hidden]);
        let mut out = FloatBuffer::allocate(&gpu, Float::F16, 512 * inner).unwrap();
        for m in [1, 512] {
            let norm = bench.microseconds(&format!("rms_norm of {m}"), |stream| {
                let (residual, update) = (residual.view_mut().slice(0..m * hidden), update.view().slice(0..m * hidden));
                let out = out.view_mut(0..m * hidden);
                let norm = Norm { residual, update: Some(update), weight: weight.view(), eps: 1e-5, out };
                nn::rms_norm(&gpu, stream, norm)
            });
            let gate_up = bench.upload(&vec![0.5f32; m * 2 * inner]);
            let gate = bench.microseconds(&format!("swiglu of {m}"), |stream| {
                nn::swiglu(&gpu, stream, gate_up.view(), inner, out.view_mut(0..m * inner))
            });
            if m == 1 {
                held("rms_norm", norm, 6.0);
                held("swiglu", gate, 6.0);
            }
        }
        assert!(gpu.context().info().name.as_str() != "NVIDIA H200" || over.is_empty(), "{over:#?}");
    }
}
