//! A small residual network end to end, three ways: in f32, with 4-bit weights, and in bytes.
//!
//! ```sh
//! cargo run --release -p halfbyte --example residual_network
//! cargo run --release -p halfbyte --example residual_network -- --device cuda     # and the last two on a GPU
//! ```
//!
//! `network.rs` is the network, written once for every arithmetic; `floats.rs` and `bytes.rs` compute it on every machine:
//! `machine.rs` is what they need of a device beside layers, `gpu.rs` that of a GPU, where `checked.rs` compares every operation
//! with the CPU's. `calibration.rs` and `noise.rs` say what ranges its values have and what error is to be expected.

mod bytes;
mod calibration;
mod checked;
mod comparison;
mod floats;
mod gpu;
mod machine;
mod network;
mod noise;
mod random;
mod shapes;

use comparison::{Settings, agreement, compare};
use halfbyte::Error;
use halfbyte::cpu::Cpu;
use halfbyte::cuda::Cuda;
use std::time::Duration;

fn main() -> halfbyte::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let gpu = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] | ["--device", "cpu"] => None,
        ["--device", "cuda"] => Some(Cuda::open(0)?),
        _ => {
            let (expected, got) = ("nothing, or --device cpu or cuda".to_owned(), arguments.join(" "));
            return Err(Error::Invalid { op: "residual_network", expected, got });
        }
    };
    let cpu = Cpu::all_threads()?;
    let (size, images, batch) = (32, 200, 8);
    let time = Duration::from_secs(1);
    let settings = Settings { channels: &[32, 64, 128], size, fitted: 160, calibrated: 32, images, batch, time };
    println!(
        "{images} images of {size}×{size}, {batch} at a time, {} threads, {}",
        cpu.threads().count(),
        cpu.caps().isa.name()
    );
    println!("errors are those of the classes against f32, in parts of their root mean square\n");
    println!("                       weights  µs/image  shapes told  as f32   error  expected  greatest");
    for way in compare(&cpu, &settings, gpu.as_ref())? {
        let share = |count: usize| 100.0 * count as f64 / images as f64;
        print!(
            "{:<20} {:>6.1} kB  {:>8.1}",
            way.name,
            way.weight_bytes as f64 / 1e3,
            1e6 * way.seconds / images as f64
        );
        print!("  {:>9.1} %  {:>4.1} %", share(way.right), share(way.same));
        match way.errors {
            Some(errors) => {
                let [error, expected, greatest] = errors.map(|error| error / way.signal);
                println!("  {error:>6.4}  {expected:>8.4}  {greatest:>8.4}");
            }
            None => println!(),
        }
    }
    if let Some(gpu) = &gpu {
        let found = agreement(&cpu, &settings, gpu)?;
        println!("\non {}, each operation beside the CPU's on the same input:", gpu.gpu().context().info().name);
        println!("int8       {} of {} codes and classes have other bits", found.different, found.compared);
        println!(
            "w4a16-g32  products differ by up to {:.3} of both bounds, {} sums and means are not the nearest halves",
            found.worst, found.not_nearest
        );
    }
    Ok(())
}
