//! `cargo xtask c-header`: the header of the C interface, from the sources of halfbyte-c. The test makes it anew and compares.

use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {}

/// The crate of the interface.
pub const FOLDER: &str = "crates/halfbyte-c";

/// What lies in its folder `include`.
pub const HEADER: &str = "halfbyte.h";

/// The sources, in the order in which the header has them.
const SOURCES: [&str; 9] = [
    "version.rs",
    "status.rs",
    "device.rs",
    "checkpoint.rs",
    "weight.rs",
    "linear.rs",
    "conv2d.rs",
    "int8.rs",
    "model.rs",
];

pub fn run(_: &Args) -> Result<(), String> {
    let folder = root()?.join(FOLDER);
    let path = folder.join("include").join(HEADER);
    std::fs::write(&path, text(&folder)?).map_err(|e| format!("{}: {e}", path.display()))?;
    println!("{}", path.display());
    Ok(())
}

/// The repository.
pub fn root() -> Result<PathBuf, String> {
    Ok(Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no folder")?.to_owned())
}

/// The header.
fn text(folder: &Path) -> Result<Vec<u8>, String> {
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml"))?;
    let builder = SOURCES.iter().fold(cbindgen::Builder::new().with_config(config), |builder, source| {
        builder.with_src(folder.join("src").join(source))
    });
    let mut out = Vec::new();
    builder.generate().map_err(|e| e.to_string())?.write(&mut out);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_that_of_the_sources() {
        let folder = root().unwrap().join(FOLDER);
        let found = std::fs::read(folder.join("include").join(HEADER)).unwrap();
        assert!(found == text(&folder).unwrap(), "run `cargo xtask c-header`");
        // Every source with a function that C sees is among those that the header is made from, and every function in the header.
        let header = String::from_utf8(found).unwrap();
        assert!(header.is_ascii(), "compilers do not agree on what else means");
        for entry in std::fs::read_dir(folder.join("src")).unwrap() {
            let path = entry.unwrap().path();
            let source = std::fs::read_to_string(&path).unwrap();
            for declared in source.split("#[unsafe(no_mangle)]\npub extern \"C\" fn ").skip(1) {
                let name = declared.split('(').next().unwrap();
                assert!(header.contains(&format!("{name}(")), "{}: {name} is not in the header", path.display());
            }
        }
    }
}
