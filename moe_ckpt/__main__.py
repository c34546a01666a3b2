from moe_ckpt import main

main()
