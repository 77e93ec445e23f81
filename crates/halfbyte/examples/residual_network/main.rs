//! A small residual network end to end, three ways: in f32, with 4-bit weights, and in bytes.
//!
//! ```sh
//! cargo run --release -p halfbyte --example residual_network
//! ```
//!
//! `network.rs` is the network, written once for every arithmetic; `floats.rs` and `bytes.rs` compute it, `calibration.rs` and
//! `noise.rs` say what ranges its values have and what error is to be expected.

mod bytes;
mod calibration;
mod comparison;
mod floats;
mod network;
mod noise;
mod random;
mod shapes;

use comparison::{Settings, compare};
use halfbyte::cpu::Cpu;
use std::time::Duration;

fn main() -> halfbyte::Result<()> {
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
    println!("             weights  µs/image  shapes told  as f32   error  expected  greatest");
    for way in compare(&cpu, &settings)? {
        let share = |count: usize| 100.0 * count as f64 / images as f64;
        print!(
            "{:<10} {:>6.1} kB  {:>8.1}",
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
    Ok(())
}
