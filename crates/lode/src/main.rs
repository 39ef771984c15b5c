//! The `lode` command.
mod door;
mod mount;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(tracing_subscriber::EnvFilter::from_env("LODE_LOG"))
        .init();
    let known = |w: &str| ["mount", "umount", "mkfs"].contains(&w);
    if let Some(request) = mount::options::helper(&arguments, known) {
        return match request {
            Ok(request) => mount::run(request),
            Err(e) => {
                eprintln!("lode: {e}");
                ExitCode::from(2)
            }
        };
    }
    let word = |n: usize| arguments.get(n).and_then(|a| a.to_str()).unwrap_or("");
    match word(1) {
        "mount" => {
            let mut request = mount::MountOptions {
                pool: arguments[2].clone(),
                dir: arguments[3].clone().into(),
                ..Default::default()
            };
            let mut rest = arguments[4..].iter();
            while let Some(a) = rest.next() {
                match a.to_str() {
                    Some("-o") => request.options.push(rest.next().unwrap().clone()),
                    Some("-f") => request.foreground = true,
                    _ => panic!("unknown {a:?}"),
                }
            }
            mount::run(request)
        }
        "mkfs" => {
            // mkfs --size SIZE POOL
            let size: u64 = word(3).trim_end_matches('M').parse::<u64>().unwrap() << 20;
            let media = lodestone::media::Pool::create(
                &[arguments[4].clone().into()],
                Some(size),
                &Default::default(),
            );
            let made = media.and_then(|m| lodestone::fs::Fs::mkfs(&m, &Default::default()));
            match made {
                Ok(()) => ExitCode::SUCCESS,
                Err(e) => {
                    eprintln!("lode: {e:?}");
                    ExitCode::FAILURE
                }
            }
        }
        "umount" => mount::umount(std::path::Path::new(&arguments[2])),
        _ => ExitCode::from(2),
    }
}
